/* The request of the user as a value: sent to the server, and stored in the link.

   The changes are those of regard.explore.changes, in the same form:
   {"heads": [["decoder", 0, 3]], "future": true, "rows": [["cross", 1, 2, 5, [0.1, 0.9]]]} */

import type { PartName, Space } from "./look";

export type HeadName = [PartName, number, number]; // part, layer, head
export type LayerName = [PartName, number];
export type RowName = [PartName, number, number, number, number[]]; // part, layer, head, query, weights

export interface Changes {
  heads: HeadName[];
  layers: LayerName[];
  future: boolean;
  temperature: number;
  shuffle: number | null;
  rows: RowName[];
}

export function noChanges(): Changes {
  return { heads: [], layers: [], future: false, temperature: 1, shuffle: null, rows: [] };
}

/** Only fields with changes, in the form of the server and the link. */
export function compact(changes: Changes): Partial<Changes> {
  const none = noChanges();
  const entries = Object.entries(changes).filter(([name, value]) => {
    const plain = none[name as keyof Changes];
    return Array.isArray(value) ? value.length > 0 : value !== plain;
  });
  return Object.fromEntries(entries);
}

export function anyChange(changes: Changes): boolean {
  return Object.keys(compact(changes)).length > 0;
}

export const VIEWS = ["model", "lines", "map", "steps", "positions", "image", "search"] as const;
export type View = (typeof VIEWS)[number];
export type Shown = "after" | "before" | "change";

export interface Ask {
  run: string;
  text: string;
  target: string | null; // null: what the model generates itself
  image: string | null; // the name under which the server keeps it
  view: View;
  part: PartName | null; // null: the default part
  layer: number;
  head: number | null; // null: the mean of the layer's heads
  query: Record<Space, number | null>; // the query whose attention is shown
  show: Shown;
  beam: number;
  changes: Changes;
}

export function newAsk(run: string): Ask {
  return {
    run,
    text: "",
    target: null,
    image: null,
    view: "model",
    part: null,
    layer: 0,
    head: 0,
    query: { source: null, target: null },
    show: "after",
    beam: 4,
    changes: noChanges(),
  };
}

/** The fragment of the URL: only values that differ from the defaults. */
export function toLink(ask: Ask): string {
  const link = new URLSearchParams();
  const put = (name: string, value: string | number | null, usual: string | number | null = null) => {
    if (value !== usual) link.set(name, value === null ? "" : String(value));
  };
  put("run", ask.run, "");
  put("text", ask.text, "");
  put("target", ask.target);
  put("image", ask.image);
  put("view", ask.view, "model");
  put("part", ask.part);
  put("layer", ask.layer, 0);
  put("head", ask.head, 0);
  put("at.source", ask.query.source);
  put("at.target", ask.query.target);
  put("show", ask.show, "after");
  put("beam", ask.beam, 4);
  if (anyChange(ask.changes)) link.set("changes", JSON.stringify(compact(ask.changes)));
  return link.toString();
}

/** The state in a link; missing or invalid values keep their defaults. */
export function fromLink(link: string): Ask {
  const found = new URLSearchParams(link.replace(/^#/, ""));
  const ask = newAsk(found.get("run") ?? "");
  const whole = (name: string): number | null => {
    const text = found.get(name);
    return text !== null && /^\d{1,6}$/.test(text) ? Number(text) : null;
  };
  ask.text = found.get("text") ?? "";
  ask.target = found.get("target");
  ask.image = found.get("image");
  ask.view = VIEWS.find((view) => view === found.get("view")) ?? "model";
  ask.part = (["encoder", "decoder", "cross"] as const).find((part) => part === found.get("part")) ?? null;
  ask.layer = whole("layer") ?? 0;
  ask.head = found.get("head") === "" ? null : (whole("head") ?? 0);
  ask.query = { source: whole("at.source"), target: whole("at.target") };
  ask.show = (["before", "change"] as const).find((show) => show === found.get("show")) ?? "after";
  ask.beam = Math.min(Math.max(whole("beam") ?? 4, 1), 8);
  ask.changes = readChanges(found.get("changes"));
  return ask;
}

/** The changes in a link. The server validates every field. */
function readChanges(text: string | null): Changes {
  const none = noChanges();
  if (text === null) return none;
  try {
    const found: unknown = JSON.parse(text);
    if (typeof found !== "object" || found === null) return none;
    const known = Object.entries(found).filter(([name, value]) => {
      const plain = none[name as keyof Changes];
      if (!(name in none)) return false;
      return Array.isArray(plain) ? Array.isArray(value) : !Array.isArray(value) && typeof value !== "object";
    });
    return { ...none, ...Object.fromEntries(known) };
  } catch {
    return none;
  }
}

export function sameHead(one: HeadName, other: HeadName): boolean {
  return one.every((value, index) => value === other[index]);
}
