/* The picture of a model: what is computed, from a token to the output, as boxes and lines.

   One layer of each stack is open, the others are one box each. The residual stream is a vertical line; a sub-layer
   branches off to the side and is added back. A norm stands where the model computes it: inside the branch (pre-LN), or
   on the stream after the sum (post-LN). */

import type { Block, Side } from "./look";

export type StackName = "encoder" | "decoder";

export interface LayerInfo {
  mixer: string;
  heads: number; // of self-attention; 0: a mixer without heads
  cross: number; // heads of cross-attention
  experts: number;
  cache: number; // bytes of keys and values per token; 0: none are kept
  kv_heads: number;
  reach: number | null; // a window: only this many tokens are kept
}

export interface StackInfo {
  name: StackName;
  kind: "transformer" | "recurrent";
  side: Side;
  input: "tokens" | "patches" | "features";
  dim: number;
  embed_scale: number;
  types: boolean; // a vector for the sentence, A or B, is added
  cls: boolean; // a learned vector is the first patch
  layers: LayerInfo[];
  // transformer
  norm: "layer" | "rms" | "none";
  norm_order: "pre" | "post";
  eps: number;
  residual: boolean;
  position: string;
  embed_norm: boolean;
  final_norm: boolean;
  causal: boolean;
  activation: string;
  ff_dim: number;
  key_dim: number;
  scale: number;
  score: "dot" | "multiplicative" | "additive" | "concat";
  bias: boolean; // of the linear layers
  qk_norm: boolean;
  // recurrent
  cell: string;
  count: number;
  cross: boolean;
}

export interface Best {
  label: string;
  logit: number;
  probability: number;
}

export interface Flow {
  at: Partial<Record<StackName, number>>;
  stacks: StackInfo[];
  output: {
    kind: string;
    head: string;
    pooling: string;
    pooler: boolean;
    head_layer: boolean; // BERT's: a linear layer, GELU and a norm before the logits
    bias: boolean;
    scale: number;
    tied: boolean;
    values?: number[]; // the predicted numbers
    size?: number;
    max?: number;
    log_sum?: number;
    best: Best[];
  };
  shapes: Record<string, number[]>;
  arrays: { name: string; type: "f4"; shape: number[]; offset: number }[];
  blocks: Map<string, Block>;
}

export const KINDS = [
  "token", "embedding", "position", "add", "norm", "q", "k", "v", "cache", "head", "mix", "project", "up", "activation",
  "down", "experts", "layer", "memory", "pooled", "logits", "softmax", "values", "cell", "readout",
] as const; // prettier-ignore
export type Kind = (typeof KINDS)[number];

export interface Box {
  id: string;
  kind: Kind;
  stack: StackInfo;
  layer: number | null;
  part: "attention" | "cross" | "feedforward" | null;
  stage: string | null; // the activation that it computes
  head: number;
  label: number; // x of the number of a sum, from the left of its box
  x: number;
  y: number;
  w: number;
  h: number;
}

export interface Line {
  d: string;
  kind: "stream" | "branch" | "memory" | "previous"; // previous: of the step before
}

export interface Picture {
  boxes: Box[];
  lines: Line[];
  frames: { x: number; y: number; w: number; h: number; layer: number; stack: StackInfo }[];
  captions: { x: number; y: number; part: NonNullable<Box["part"]> }[];
  width: number;
  height: number;
}

const [ROW, GAP, SIDE] = [40, 12, 30]; // height of a box, space between two, from the stream to the branch

export function vector(flow: Flow, stage: string | null): Float32Array | null {
  return (stage && (flow.blocks.get(`v:${stage}`)?.values as Float32Array)) || null;
}

/** The length of a vector. */
export function length(values: ArrayLike<number>): number {
  let sum = 0;
  for (let i = 0; i < values.length; i++) sum += values[i] * values[i];
  return Math.sqrt(sum);
}

/** One stack, from top to bottom. */
class Column {
  boxes: Box[] = [];
  lines: Line[] = [];
  frames: Picture["frames"] = [];
  captions: Picture["captions"] = [];
  #end: number; // where the stream ends so far
  #stream: number; // x of the stream
  #left: number; // x of the branches
  #wide: number; // their width
  memory: [number, number] | null = null; // where the encoder's output leaves
  readers: [number, number][] = []; // where cross-attention reads it

  constructor(
    readonly flow: Flow,
    readonly stack: StackInfo,
    readonly x: number,
    y: number,
    readonly width: number,
    readonly mirrored: boolean,
  ) {
    this.#end = y;
    this.#stream = mirrored ? x + width - 16 : x + 16;
    this.#left = mirrored ? x + 10 : x + 16 + SIDE;
    this.#wide = width - 26 - SIDE;
  }

  get bottom(): number {
    return this.#end;
  }

  #has(stage: string): boolean {
    return stage in this.flow.shapes;
  }

  #box(kind: Kind, stage: string | null, x: number, y: number, w: number, h = ROW, more: Partial<Box> = {}): Box {
    const id = more.id ?? stage ?? `${this.stack.name}.${kind}`;
    const box = { id, kind, stack: this.stack, layer: null, part: null, stage, head: 0, label: 0, x, y, w, h, ...more };
    this.boxes.push(box);
    return box;
  }

  #line(kind: Line["kind"], ...points: [number, number][]): void {
    this.lines.push({ kind, d: rounded(points) });
  }

  /** A box on the stream. */
  on(kind: Kind, stage: string | null, h = ROW, more: Partial<Box> = {}): Box {
    const y = this.#end + GAP;
    if (this.boxes.length) this.#line("stream", [this.#stream, this.#end], [this.#stream, y]);
    const [inset, wide] = more.layer == null ? [0, this.width] : [8, this.width - 16];
    const box = this.#box(kind, stage, this.x + inset, y, wide, h, more);
    this.#end = y + h;
    return box;
  }

  /** Token, embedding and, if vectors are added for them, positions. */
  input(): void {
    const { name } = this.stack;
    this.on("token", null, 32);
    const encoded = `${name}.position_encoding`;
    if (!this.#has(encoded)) {
      this.on("embedding", `${name}.embedding`);
    } else {
      const [y, half] = [this.#end + GAP, (this.width - 10) / 2];
      const [first, second] = this.mirrored ? [this.x + half + 10, this.x] : [this.x, this.x + half + 10];
      this.#line("stream", [this.#stream, this.#end], [this.#stream, y]);
      this.#box("embedding", `${name}.embedding`, first, y, half);
      this.#box("position", encoded, second, y, half);
      const at = y + ROW + GAP + 9;
      this.#line("branch", [second + half / 2, y + ROW], [second + half / 2, at], [this.#stream + (this.mirrored ? -9 : 9), at]);
      this.#line("stream", [this.#stream, y + ROW], [this.#stream, at - 9]);
      this.#sum(at, this.stack.embed_norm ? null : `${name}.embedded`, { id: `${name}.embedding.sum` });
      if (!this.stack.embed_norm) {
        this.#line("stream", [this.#stream, this.#end], [this.#stream, this.#end + 6]);
        this.#end += 6;
      }
    }
    if (this.stack.embed_norm) this.on("norm", `${name}.embedded`, 32);
  }

  #sum(y: number, stage: string | null, more: Partial<Box>): void {
    this.#box("add", stage, this.#stream - 9, y - 9, 18, 18, { ...more, label: this.#left + this.#wide - this.#stream + 9 });
    this.#end = y + 9;
  }

  layer(layer: number, open: boolean): void {
    const { name, norm_order, norm } = this.stack;
    const at = { layer };
    if (!open) {
      this.on("layer", `${name}.${layer}.output`, 28, at);
      return;
    }
    const top = this.#end + GAP;
    this.#line("stream", [this.#stream, this.#end], [this.#stream, top + 10]);
    this.#end = top + 10;
    const info = this.stack.layers[layer];
    for (const part of ["attention", "cross", "feedforward"] as const) {
      if (part === "cross" && !info.cross) continue;
      const path = `${name}.${layer}.${part}`;
      const more = { layer, part };
      this.captions.push({ x: this.#left, y: this.#end + 12, part });
      this.#line("stream", [this.#stream, this.#end], [this.#stream, this.#end + 16]);
      this.#end += 16;
      const from = this.#end + 4; // where the branch leaves the stream
      const near = this.mirrored ? this.#left + this.#wide : this.#left;
      let y = this.#end + 4;
      if (norm_order === "pre" && norm !== "none") {
        this.#box("norm", `${path}.norm`, this.#left, y, this.#wide, 30, more);
        this.#line("branch", [this.#stream, from], [this.#stream, y + 15], [near, y + 15]);
        y += 30 + GAP;
      } else {
        y += 6;
      }
      const before = norm_order === "pre" && norm !== "none" ? null : ([this.#stream, from] as [number, number]);
      const last = part === "feedforward" ? this.#feedforward(path, y, more, before) : this.#attention(path, y, more, before);
      const at = last.y + last.h + 12;
      const middle = this.mirrored ? last.x + last.w - 24 : last.x + 24;
      this.#line("branch", [middle, last.y + last.h], [middle, at], [this.#stream + (this.mirrored ? -9 : 9), at]);
      if (this.stack.residual) this.#line("stream", [this.#stream, this.#end], [this.#stream, at - 9]);
      this.#sum(at, `${path}.sum`, more);
      if (norm_order === "post" && norm !== "none") {
        this.#line("stream", [this.#stream, this.#end], [this.#stream, this.#end + 10]);
        this.#end += 10;
        this.on("norm", `${path}.norm`, 30, more);
        this.#line("stream", [this.#stream, this.#end], [this.#stream, this.#end + 4]);
        this.#end += 4;
      }
    }
    const bottom = this.#end + (norm_order === "post" && norm !== "none" ? 10 : 20);
    this.#line("stream", [this.#stream, this.#end], [this.#stream, bottom]);
    this.#end = bottom;
    this.frames.push({ x: this.x, y: top, w: this.width, h: bottom - top, layer, stack: this.stack });
  }

  /** Lines from the norm (or the stream) down to boxes in a row. */
  #fan(boxes: Box[], y: number, stream: [number, number] | null): void {
    const centre = this.#left + this.#wide / 2;
    for (const box of boxes) {
      const x = box.x + box.w / 2;
      if (stream) this.#line("branch", stream, [this.#stream, y - 6], [x, y - 6], [x, y]);
      else this.#line("branch", [centre, y - GAP], [centre, y - GAP / 2], [x, y - GAP / 2], [x, y]);
    }
  }

  #row(y: number, kinds: [Kind, string][], more: Partial<Box>): Box[] {
    const wide = (this.#wide - 8 * (kinds.length - 1)) / kinds.length;
    return kinds.map(([kind, stage], index) => {
      const place = this.mirrored ? kinds.length - 1 - index : index;
      return this.#box(kind, stage, this.#left + place * (wide + 8), y, wide, ROW, more);
    });
  }

  #attention(path: string, y: number, more: Partial<Box>, stream: [number, number] | null): Box {
    const info = this.stack.layers[more.layer!];
    if (!this.#has(`${path}.q`)) {
      const [box] = this.#row(y, [["mix", `${path}.output`]], more);
      this.#fan([box], y, stream);
      return box;
    }
    const [q, k, v] = this.#row(y, [["q", `${path}.q`], ["k", `${path}.k`], ["v", `${path}.v`]], more);
    if (more.part === "cross") {
      this.#fan([q], y, stream);
      this.readers.push([this.mirrored ? v.x : v.x + v.w, y + ROW / 2]);
    } else {
      this.#fan([q, k, v], y, stream);
    }
    let under = y + ROW;
    const down = (x: number, from: number, to: number) => this.#line("branch", [x, from], [x, to]);
    const heads = more.part === "cross" ? info.cross : info.heads;
    const cached = info.cache > 0 && more.part === "attention";
    if (cached) {
      const cache = this.#box("cache", null, Math.min(k.x, v.x), under + 8, 2 * k.w + 8, 26, { ...more, id: `${path}.cache` });
      for (const box of [k, v]) down(box.x + box.w / 2, under, cache.y);
      under = cache.y + cache.h;
    }
    const top = under + GAP;
    down(q.x + q.w / 2, y + ROW, top);
    for (const box of [k, v]) down(box.x + box.w / 2, under, top);
    const each = Math.max(1, Math.min(heads, Math.floor((this.#wide + 4) / 22)));
    const [rows, size] = [Math.ceil(heads / each), Math.min(30, (this.#wide + 4) / each - 4)];
    const start = this.#left + (this.#wide - each * (size + 4) + 4) / 2;
    for (let head = 0; head < heads; head++) {
      const [column, row] = [head % each, Math.floor(head / each)];
      const id = `${path}.heads.${head}`;
      this.#box("head", `${path}.heads`, start + column * (size + 4), top + 4 + row * (size + 4), size, size, { ...more, id, head });
    }
    const below = top + 4 + rows * (size + 4) + 4;
    down(this.#left + this.#wide / 2, below - 4, below + GAP - 4);
    return this.#box("project", `${path}.output`, this.#left, below + GAP - 4, this.#wide, 34, more);
  }

  #feedforward(path: string, y: number, more: Partial<Box>, stream: [number, number] | null): Box {
    if (this.stack.layers[more.layer!].experts) {
      const [box] = this.#row(y, [["experts", `${path}.output`]], more);
      this.#fan([box], y, stream);
      return box;
    }
    const kinds: [Kind, string][] = [["up", `${path}.up`], ["activation", `${path}.hidden`], ["down", `${path}.output`]];
    const [up, middle, down] = this.#row(y, kinds, more);
    this.#fan([up], y, stream);
    for (const [one, other] of [[up, middle], [middle, down]]) {
      const [from, to] = one.x < other.x ? [one.x + one.w, other.x] : [one.x, other.x + other.w];
      this.#line("branch", [from, y + ROW / 2], [to, y + ROW / 2]);
    }
    return down;
  }

  /** The encoder of an encoder-decoder ends with its memory, the last stack with the output. */
  output(last: boolean): void {
    const { name, final_norm } = this.stack;
    if (final_norm) this.on("norm", `${name}.output`, 32);
    if (!last) {
      const box = this.on("memory", `${name}.output`, ROW, { id: "memory" });
      this.memory = [this.x + this.width, box.y + box.h / 2];
      return;
    }
    if (this.#has("pooled")) this.on("pooled", "pooled");
    if (this.#has("values")) this.on("values", "values");
    if (!this.#has("logits")) return;
    this.on("logits", "logits", 32);
    this.on("softmax", null, 26 + 18 * Math.min(5, this.flow.output.best.length), { id: "softmax" });
  }

  /** The encoder and decoder of 2015. */
  recurrent(): void {
    const { name } = this.stack;
    if (name === "encoder") {
      this.on("cell", "encoder.output", ROW, { id: "encoder.cell" });
      return;
    }
    const part = { part: "cross" as const, layer: 0 };
    const y = this.#end + 14;
    const [q, last] = this.#recurrentAttention(y, part);
    this.#line("stream", [this.#stream, this.#end], [this.#stream, last + GAP]);
    this.#end = last;
    const cell = this.on("cell", "decoder.states", ROW, { id: "decoder.cell" });
    const [edge, lane] = this.mirrored ? [q.x + q.w, q.x + q.w + 12] : [q.x, q.x - 12]; // the query is the state before
    this.#line("previous", [lane, cell.y], [lane, y + ROW / 2], [edge, y + ROW / 2]);
    this.on("readout", "decoder.output");
  }

  #recurrentAttention(y: number, more: Partial<Box>): [Box, number] {
    const path = "decoder.cross";
    const [q, k, v] = this.#row(y, [["q", `${path}.q`], ["k", `${path}.k`], ["v", `${path}.v`]], more);
    this.readers.push([this.mirrored ? v.x : v.x + v.w, y + ROW / 2]);
    const top = y + ROW + GAP;
    for (const box of [q, k, v]) this.#line("branch", [box.x + box.w / 2, y + ROW], [box.x + box.w / 2, top]);
    const centre = this.#left + this.#wide / 2;
    const head = this.#box("head", `${path}.heads`, centre - 15, top + 2, 30, 30, { ...more, id: `${path}.heads.0` });
    const at = head.y + 46;
    this.#line("branch", [centre, head.y + 30], [centre, at], [this.#stream, at]);
    return [q, at];
  }
}

/** A path through these points with rounded corners. */
function rounded(points: [number, number][]): string {
  let d = `M${points[0][0].toFixed(1)} ${points[0][1].toFixed(1)}`;
  for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
    const next = points[i + 1];
    if (!next) {
      d += `L${x1.toFixed(1)} ${y1.toFixed(1)}`;
      continue;
    }
    const reach = (x: number, y: number) => Math.min(6, Math.hypot(x - x1, y - y1) / 2);
    const toward = (x: number, y: number) => {
      const far = Math.hypot(x - x1, y - y1) || 1;
      const r = reach(x, y);
      return `${(x1 + ((x - x1) / far) * r).toFixed(1)} ${(y1 + ((y - y1) / far) * r).toFixed(1)}`;
    };
    d += `L${toward(x0, y0)}Q${x1.toFixed(1)} ${y1.toFixed(1)} ${toward(...next)}`;
  }
  return d;
}

/** The picture in this width; `open` is the open layer of each stack. */
export function layOut(flow: Flow, width: number, open: Record<StackName, number>): Picture {
  const two = flow.stacks.length > 1;
  const beside = two && width >= 500;
  const wide = beside ? Math.min(330, (width - 34) / 2) : Math.min(width - (two ? 14 : 2), 460);
  const columns: Column[] = [];
  let y = 2;
  flow.stacks.forEach((stack, index) => {
    const x = beside && index ? wide + 34 : 1;
    const column = new Column(flow, stack, x, y, wide, beside && index > 0);
    column.input();
    stack.layers.forEach((_, layer) => column.layer(layer, layer === Math.min(open[stack.name], stack.layers.length - 1)));
    if (stack.kind === "recurrent") column.recurrent();
    column.output(index === flow.stacks.length - 1);
    columns.push(column);
    if (!beside) y = column.bottom + 26;
  });
  const lines = columns.flatMap((column) => column.lines);
  const [first, last] = [columns[0], columns[columns.length - 1]];
  if (first.memory) {
    const lane = beside ? wide + 18 : wide + 9;
    for (const [x, at] of last.readers) lines.push({ kind: "memory", d: rounded([first.memory, [lane, first.memory[1]], [lane, at], [x, at]]) });
  }
  return {
    boxes: columns.flatMap((column) => column.boxes),
    lines,
    frames: columns.flatMap((column) => column.frames),
    captions: columns.flatMap((column) => column.captions),
    width: beside ? 2 * wide + 36 : wide + (two ? 14 : 2),
    height: Math.max(...columns.map((column) => column.bottom)) + 4,
  };
}
