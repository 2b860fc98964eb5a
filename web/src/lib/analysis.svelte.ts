/* Analysis of activations: one answer of the server for one request. The newest request wins; an older one is aborted,
   and the server stops computing it. The latest answers are kept for the export of a view. */

import { explorer } from "./explorer.svelte";
import type { HeadMap } from "./look";
import * as server from "./server";

export interface Lens {
  positions: number[];
  read: string[];
  rows: string[];
  labels: string[][][]; // row, position, rank
  probabilities: number[][][];
  entropy: number[][];
  final: number[][]; // probability of what the whole model predicts
  rank: number[][];
  final_norm: boolean;
  total: number; // positions of the output
}

export interface Attribution {
  token: string;
  minus: string | null;
  logit: number;
  embeddings: number;
  biases: number;
  attention: Record<string, number[]>;
  heads: Record<string, number[][]>; // part: layer, head
  feedforward: number[];
}

export interface Saliency {
  token: string;
  sides: ("source" | "read")[];
  labels: string[];
  attention: number[];
  rollout: number[];
  gradient: number[];
}

export interface Scores {
  induction: number[][];
  copying: number[][] | null;
}

export interface Patching {
  answers: [string, string];
  residual: Record<string, number[][]>;
  heads: Record<string, number[][]>;
  labels: Record<string, [string, string][]>;
}

export interface Patched {
  choices: { label: string; clean: number; corrupted: number; patched: number }[];
}

export interface Units {
  stack: "encoder" | "decoder";
  layer: number;
  units: number;
  labels: string[];
  top: [number, number, number][]; // unit, position, activation
  unit: number;
  activations: number[];
  writes: [[string, number][], [string, number][]] | null;
}

export interface Points {
  labels: string[];
  explained: [number, number];
  arrays: [];
}

export interface Near {
  id: number;
  label: string;
  neighbours: [number, string, number][];
}

export interface Picture {
  kind: string;
  rows: "position" | "head" | "distance";
  columns: "dimension" | "pair" | "distance";
  first: number;
  arrays: [];
}

export class Answer<T> {
  value = $state.raw<T | null>(null);
  error = $state<string | null>(null);
  busy = $state(false);
  #key = "";
  #abort: AbortController | null = null;

  constructor(readonly path: string) {}

  async ask(body: object): Promise<void> {
    const key = JSON.stringify(body);
    if (key === this.#key && !this.error) return;
    this.#key = key;
    this.#abort?.abort();
    this.#abort = new AbortController();
    this.busy = true;
    this.error = null;
    exported.answers.delete(this.path);
    try {
      const value = await server.analysis<T>(this.path, body, this.#abort.signal);
      if (key !== this.#key) return;
      this.value = value;
      exported.answers.set(this.path, value);
    } catch (error) {
      if (key !== this.#key) return;
      this.value = null;
      if (error instanceof server.Refused) this.error = error.message;
      else explorer.fail(error);
    }
    this.busy = false;
  }

  clear(): void {
    this.#key = "";
    this.#abort?.abort();
    exported.answers.delete(this.path);
    this.value = this.error = null;
    this.busy = false;
  }
}

/** A table of cells on the page, for exported figures; without a value, a cell has no colour. */
export interface Table {
  title: string;
  rows: string[];
  columns: string[];
  values: (number | null)[][];
  texts: string[][];
  signed: boolean;
  most: number;
  wide?: [number, number]; // pixels of a row's name and of a cell
}

/** A map beside another one. */
export interface NamedMap {
  map: HeadMap;
  rows: string[];
  columns: string[];
}

/** What views show beside the state of the page, for exports; each view removes its own. */
export const exported = {
  answers: new Map<string, unknown>(),
  tables: new Map<string, Table>(),
  maps: new Map<string, NamedMap>(),
  faintest: 0, // the smallest weight that is drawn as a line
};
