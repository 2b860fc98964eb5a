/* A listbox is one stop for Tab, however many tokens it holds; inside it, arrow keys move the choice. */

const STEPS: Record<string, number> = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** For the keydown of one option: choose and focus the one that the key leads to. */
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
