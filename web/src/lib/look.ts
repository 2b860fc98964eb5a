/* The response of the server for one input.

   A response is one frame of bytes: "RGRD", the length of a JSON header, the header, then the arrays it names,
   each at a multiple of 8. Weights are 16-bit fixed point, w = n / 65535, so a map of 128 x 128 takes 32 kB and
   has an error of at most 8e-6. */

export const ONE = 65535; // the integer that represents a weight of 1

export type Side = "source" | "read" | "written";
export type Space = "source" | "target"; // read and written count the same positions
/** "encoder": bidirectional self-attention; "decoder": causal self-attention; "cross": output over input. */
export type PartName = "encoder" | "decoder" | "cross";

/** The attention of one layer. */
export interface Part {
  part: PartName;
  layer: number;
  heads: number;
  rows: Side; // the queries
  columns: Side; // the keys
  causal: boolean;
  whole: boolean; // all weights are included; otherwise an overview, and single maps are requested
}

/** A token (or class) with its probability before and after the changes; without changes the two are equal. */
export interface Choice {
  label: string;
  before: number;
  after: number;
  text?: string; // the text to append, after the last token
}

/** The distribution at one position, after reading `read`. */
export interface Position {
  read: string;
  expected: Choice | null; // the token that the text has there
  choices: Choice[]; // the most probable before and after the changes
  divergence: number; // KL(before || after) in nats
  flipped: boolean; // the most probable one has changed
}

export interface Told {
  loss: number | null;
  generated: string | null; // what an encoder-decoder generates by itself
  hypotheses: { text: string; score: number }[];
}

export interface Output {
  kind: "next" | "target" | "masked" | "tags" | "classes" | "vector" | "values";
  before: Told;
  after: Told;
  positions: Position[];
  values?: { before: number[][]; after: number[][] }; // kind "values": the numbers of each step
  apart: number[]; // kind "vector": 1 - cosine similarity of every state and the original one
}

export interface Grid {
  down: number; // rows of patches
  across: number;
  first: number; // positions before the patches: 1 with a [CLS] token
}

interface Stored {
  name: string;
  type: "u1" | "u2" | "f4";
  shape: number[];
  offset: number;
}

export interface Header {
  run: string;
  architecture: "encoder-decoder" | "decoder" | "encoder" | "recurrent";
  parameters: number;
  shuffles: boolean; // it has a position encoding, so positions can be shuffled
  labels: Partial<Record<Side, string[]>>;
  parts: Part[];
  output: Output;
  grid: Grid | null;
  size: number | null; // pixels per side of an image
  mask: string | null; // how a masked token is typed
  unlike: Unlike[]; // how the input differs from the training data
  arrays: Stored[];
}

/** "unknown": pieces without a token; the others: what the input has, and what the training data has. */
export interface Unlike {
  kind: "unknown" | "script" | "fertility" | "bytes" | "length" | "row" | "numbers" | "range";
  what: string;
  trained?: string;
}

export interface Block {
  values: Uint8Array | Uint16Array | Float32Array;
  shape: number[];
}

export interface Look extends Header {
  blocks: Map<string, Block>;
  question: Question; // the request
}

/** The request that determines a response; views and pins do not. */
export interface Question {
  run: string;
  step: number | null; // of a snapshot
  text: string;
  target: string | null;
  image: string | null;
  changes: object;
}

const KINDS = { u1: Uint8Array, u2: Uint16Array, f4: Float32Array };

/** Parse a frame; the arrays are views of its bytes. */
export function parseFrame<T extends { arrays: Stored[] }>(bytes: ArrayBuffer): T & { blocks: Map<string, Block> } {
  const view = new DataView(bytes);
  if (bytes.byteLength < 8 || view.getUint32(0, false) !== 0x52475244) throw new Error("not a response of this server");
  const length = view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length))) as T;
  const start = Math.ceil((8 + length) / 8) * 8;
  const blocks = new Map<string, Block>();
  for (const { name, type, shape, offset } of header.arrays) {
    const size = shape.reduce((product, side) => product * side, 1);
    blocks.set(name, { values: new KINDS[type](bytes, start + offset, size), shape });
  }
  return { ...header, blocks };
}

export function spaceOf(side: Side): Space {
  return side === "source" ? "source" : "target";
}

export function blockName(part: Part): string {
  return `${part.part}.${part.layer}`;
}

/** One head's weights, [rows, columns] row by row. */
export interface HeadMap {
  values: Uint16Array;
  rows: number;
  columns: number;
}

export function headMap(look: Look, part: Part, head: number): HeadMap | null {
  const block = look.blocks.get(blockName(part));
  if (!block || !part.whole) return null;
  const [, rows, columns] = block.shape;
  const size = rows * columns;
  return { values: (block.values as Uint16Array).subarray(head * size, (head + 1) * size), rows, columns };
}

/** The mean of a layer's heads. */
export function meanMap(maps: HeadMap[]): HeadMap {
  const { rows, columns } = maps[0];
  const values = new Uint16Array(rows * columns);
  for (let i = 0; i < values.length; i++) {
    let sum = 0;
    for (const map of maps) sum += map.values[i];
    values[i] = Math.round(sum / maps.length);
  }
  return { values, rows, columns };
}

export function largest(map: { values: ArrayLike<number> }): number {
  let most = 0;
  for (let i = 0; i < map.values.length; i++) if (map.values[i] > most) most = map.values[i];
  return most;
}

/** Arrays of a response as plain numbers. */
export function plainBlocks(blocks: Map<string, Block>): Record<string, { shape: number[]; values: number[] }> {
  return Object.fromEntries([...blocks].map(([name, { values, shape }]) => [name, { shape, values: [...values] }]));
}
