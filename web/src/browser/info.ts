/* page.json, which `regard export --web` writes beside the page, and the messages between the page and its worker. */

import type { Weights } from "./graph";

export interface Info {
  name: string;
  note: string; // for the author of the page: a licence, a source
  task: "translate" | "generate" | "classify" | "fill" | "tag" | "caption" | "predict";
  input: "tokens" | "patches" | "features";
  int8: boolean;
  parameters: number;
  bytes: number; // of the graphs
  graphs: string[];
  target: boolean; // whether the output has its own tokenizer
  begin: number | null; // the first token of an output, or of an encoder's input
  end: number | null;
  source_end: number | null; // the last token of a translator's input
  mask: number | null;
  source: number | null; // the longest input, in tokens
  context: number; // tokens that a language model attends to
  layer: number; // whose attention is shown first
  classes: string[];
  punctuation: string; // of tagging: whether it is separate from words
  decode: {
    beam: number;
    length_penalty: number;
    min_length: number;
    max_length: number | null;
    max_ratio: number;
    sample: boolean;
    temperature: number;
    top_k: number;
  };
  image: { size: number; channels: number; grid: number; first: number } | null; // `first`: tokens before the patches
  numbers: { mean: number[]; std: number[]; context: number; horizon: number } | null;
}

export interface Choice {
  token: string;
  probability: number;
}

/** A generated token: its text, how probable it was, what else was, and what it attends to in each layer. */
export interface Generated extends Choice {
  choices: Choice[];
  attends: Float32Array[];
}

export interface Attention {
  rows: string[];
  columns: string[];
  weights: Weights;
}

export type Options = { text: string; temperature: number; top_k: number; count: number; beam: number };
export type Ask =
  | { kind: "open"; folder: string }
  | { kind: "run"; number: number; options: Options }
  | { kind: "image"; number: number; pixels: Uint8ClampedArray; width: number; height: number; beam: number };

export type Result = {
  text?: string;
  log_probability?: number;
  classes?: Choice[];
  masks?: Choice[][];
  tags?: { word: string; tag: string; probability: number }[];
  series?: { read: number[][]; values: number[][] };
  attention?: Attention;
  prompt?: string[];
  ended?: string;
  milliseconds: number;
};

export type Tell =
  | { kind: "progress"; bytes: number }
  | { kind: "ready"; info: Info }
  | { kind: "token"; number: number; token: Generated; text: string; prompt: string[] }
  | { kind: "result"; number: number; result: Result }
  | { kind: "error"; number: number; code: string; detail: string };
