/* A listbox is one tab stop; inside it, arrow keys move the selection. */

const STEPS: Record<string, number> = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Handles keydown of an option: selects and focuses the next one. */
export function walk(event: KeyboardEvent & { currentTarget: HTMLElement }, choose: (index: number) => void): void {
  const options = [...(event.currentTarget.parentElement?.children ?? [])] as HTMLElement[];
  const ends: Record<string, number> = { Home: 0, End: options.length - 1 };
  const wanted = ends[event.key] ?? options.indexOf(event.currentTarget) + (STEPS[event.key] ?? NaN);
  if (Number.isNaN(wanted)) return;
  event.preventDefault();
  const next = Math.min(Math.max(wanted, 0), options.length - 1);
  choose(next);
  options[next].focus();
}
