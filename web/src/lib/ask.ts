/* The request of the user as a value: sent to the server, and stored in the link.

   The changes are those of regard.explore.changes, in the same form:
   {"heads": [["decoder", 0, 3]], "future": true, "rows": [["cross", 1, 2, 5, [0.1, 0.9]]]} */

import type { PartName, Space } from "./look";

/** How the next token is sampled; top_k = 0: from all tokens. */
export interface Sampling {
  temperature: number;
  top_k: number;
  top_p: number;
  seed: number;
}

export type HeadName = [PartName, number, number]; // part, layer, head
export type LayerName = [PartName, number];
export type FeedForwardName = [PartName, number, "zero" | "mean"]; // stack, layer, what its output becomes
export type RowName = [PartName, number, number, number, number[]]; // part, layer, head, query, weights

export interface Changes {
  heads: HeadName[];
  layers: LayerName[];
  future: boolean;
  temperature: number;
  shuffle: number | null;
  rows: RowName[];
  feedforward: FeedForwardName[];
}

export function noChanges(): Changes {
  return { heads: [], layers: [], future: false, temperature: 1, shuffle: null, rows: [], feedforward: [] };
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

export const VIEWS = [
  "flow", "model", "lines", "map", "steps", "positions", "image", "search", "generate",
  "lens", "attribution", "patching", "neurons", "embeddings", "training", "compare",
] as const;
export type View = (typeof VIEWS)[number];
/** Views of one head, which is chosen above them. */
export const HEAD_VIEWS: readonly View[] = ["lines", "map", "steps", "positions", "image"];
export type Shown = "after" | "before" | "change";
/** What the grid of all heads shows: their maps, their roles, or what is lost without each. */
export const GRIDS = ["maps", "roles", "off"] as const;
export type Grid = (typeof GRIDS)[number];

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
  box: string | null; // the open box of the picture
  sampling: Sampling; // of the generation step by step
  changes: Changes;
  step: number | null; // the snapshot whose weights are shown; null: the trained model
  grid: Grid;
  /** The second side of a comparison; "" and null: as the first. */
  other: { run: string; text: string; step: number | null; image: string | null };
  unit: number | null; // of a feed-forward layer; null: the most active one
  near: string; // the token whose neighbours are shown; "": none
  tour: number | null; // the step of the tour, from 1 on
}

const SAMPLING: Sampling = { temperature: 1, top_k: 0, top_p: 1, seed: 1 };

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
    box: null,
    sampling: { ...SAMPLING },
    changes: noChanges(),
    step: null,
    grid: "maps",
    other: { run: "", text: "", step: null, image: null },
    unit: null,
    near: "",
    tour: null,
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
  put("step", ask.step);
  put("grid", ask.grid, "maps");
  put("other.run", ask.other.run, "");
  put("other.text", ask.other.text, "");
  put("other.step", ask.other.step);
  put("other.image", ask.other.image);
  put("unit", ask.unit);
  put("near", ask.near, "");
  put("tour", ask.tour);
  put("box", ask.box);
  for (const [name, usual] of Object.entries(SAMPLING)) put(name, ask.sampling[name as keyof Sampling], usual);
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
  ask.step = whole("step");
  ask.grid = GRIDS.find((grid) => grid === found.get("grid")) ?? "maps";
  const [run, text] = ["run", "text"].map((name) => found.get(`other.${name}`) ?? "");
  ask.other = { run, text, step: whole("other.step"), image: found.get("other.image") };
  ask.unit = whole("unit");
  ask.near = found.get("near") ?? "";
  ask.tour = whole("tour");
  ask.box = found.get("box");
  const within = (name: keyof Sampling, low: number, high: number) => {
    const value = Number(found.get(name) ?? NaN);
    if (value >= low && value <= high) ask.sampling[name] = value;
  };
  within("temperature", 0.1, 2);
  within("top_p", 0.05, 1);
  ask.sampling.top_k = Math.min(whole("top_k") ?? 0, 50);
  ask.sampling.seed = whole("seed") ?? 1;
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
