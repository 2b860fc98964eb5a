/* The past of the page: entries of the browser's history for Back and Forward, and a list of changes for Undo.

   One action is one entry. What follows quickly in the same field, such as typing or dragging, belongs to the entry of
   its first step; switching a head, a layer or a mask is always an action of its own. */

import { compact, fromLink, toLink, type Ask, type Changes } from "./ask";

const SAME = 900; // ms between two steps of one action
const SWITCHES = ["heads", "layers", "future", "shuffle"];

/** The names of the fields in which two states differ; of the changes also which. */
function fields(before: Ask, after: Ask): string {
  const parts = (ask: Ask): Record<string, unknown> => ({ ...ask, changes: undefined, ...compact(ask.changes) });
  const [old, now] = [parts(before), parts(after)];
  const names = new Set([...Object.keys(old), ...Object.keys(now)]);
  return [...names].filter((name) => JSON.stringify(old[name]) !== JSON.stringify(now[name])).join();
}

class Past {
  undone = $state.raw<string[]>([]); // changes that Redo restores, the latest last
  done = $state.raw<string[]>([]); // the changes before each action, the latest last
  #link: string | null = null;
  #changes = "{}";
  #action = "";
  #time = -Infinity;

  /** A new state of the page. `own`: the page has set it, not the user. */
  record(ask: Ask, own: boolean): void {
    const link = toLink(ask);
    const here = location.hash.slice(1);
    const old = this.#link === null ? null : fromLink(this.#link);
    const action = old ? fields(old, ask) : "";
    const now = performance.now();
    const same = action === this.#action && now - this.#time < SAME && !SWITCHES.some((name) => action.split(",").includes(name));
    this.#remember(ask, old?.run === ask.run, same);
    if (link !== here) {
      if (old === null || own || same) history.replaceState(null, "", `#${link}`);
      else history.pushState(null, "", `#${link}`);
    }
    if (link !== this.#link) [this.#action, this.#time] = [action, now];
    this.#link = link;
  }

  #remember(ask: Ask, sameRun: boolean, same: boolean): void {
    const changes = JSON.stringify(compact(ask.changes));
    if (!sameRun) this.done = this.undone = []; // they name heads of another model
    else if (changes !== this.#changes) {
      if (!same || !this.done.length) this.done = [...this.done, this.#changes].slice(-100);
      this.undone = [];
    }
    this.#changes = changes;
  }

  /** The changes before the latest action, or null; `redo`: those after it. */
  step(redo: boolean): Partial<Changes> | null {
    const [from, to] = redo ? [this.undone, this.done] : [this.done, this.undone];
    if (!from.length) return null;
    const next = from[from.length - 1];
    const [rest, other] = [from.slice(0, -1), [...to, this.#changes]];
    [this.undone, this.done] = redo ? [rest, other] : [other, rest];
    this.#changes = next; // so that `record` does not count it as a new action
    return JSON.parse(next) as Partial<Changes>;
  }
}

export const past = new Past();
