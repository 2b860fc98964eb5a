/* The graphs of the model, computed by ONNX Runtime in WebAssembly: one thread, which any static server allows. */

import * as ort from "onnxruntime-web/wasm";

import type { Info } from "./info";

export type Feeds = Record<string, ort.Tensor>;
export type Weights = { heads: number; rows: number; columns: number; data: Float32Array }[]; // of each layer [H, T, S]

ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";

export function ids(rows: number[][]): ort.Tensor {
  return new ort.Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);
}

export function ones(rows: number, length: number): ort.Tensor {
  return new ort.Tensor("int64", new BigInt64Array(rows * length).fill(1n), [rows, length]);
}

export function floats(data: Float32Array, shape: number[]): ort.Tensor {
  return new ort.Tensor("float32", data, shape);
}

/** The bytes of a file beside the page; `seen` is told how many have come. */
async function read(name: string, seen: (bytes: number) => void): Promise<Uint8Array<ArrayBuffer>> {
  const response = await fetch(new URL(name, folder));
  if (!response.ok || !response.body) throw new Error(`${name}: ${response.status}`);
  const parts: Uint8Array<ArrayBuffer>[] = [];
  let size = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    size += value.length;
    seen(value.length);
  }
  const all = new Uint8Array(size);
  parts.reduce((at, part) => (all.set(part, at), at + part.length), 0);
  return all;
}

let folder = "";
export function setFolder(address: string): void {
  folder = address;
}

export async function readJson(name: string): Promise<any> {
  return JSON.parse(new TextDecoder().decode(await read(name, () => {})));
}

export class Graph {
  private constructor(private readonly session: ort.InferenceSession) {}

  static async open(info: Info, name: string, seen: (bytes: number) => void): Promise<Graph> {
    const bytes = await read(`onnx/${name}${info.int8 ? "_quantized" : ""}.onnx`, seen);
    return new Graph(await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] }));
  }

  /** Keys and values before the first token. */
  empty(rows: number): Feeds {
    const feeds: Feeds = {};
    for (const one of this.session.inputMetadata) {
      if (!one.isTensor || !one.name.startsWith("past_key_values.")) continue;
      feeds[one.name] = floats(new Float32Array(0), [rows, Number(one.shape[1]), 0, Number(one.shape[3])]);
    }
    return feeds;
  }

  async run(feeds: Feeds): Promise<Feeds> {
    const known = new Set(this.session.inputNames);
    return this.session.run(Object.fromEntries(Object.entries(feeds).filter(([name]) => known.has(name))));
  }
}

/** A decoder at work: what it has read, as keys and values, and the output of the encoder, if it has one. */
export class Decoding {
  private past: Feeds;
  private length = 0;
  private rows = 1;

  constructor(
    private readonly graph: Graph,
    private states: ort.Tensor | null = null,
    private readonly sourceLength = 0,
  ) {
    this.past = graph.empty(1);
  }

  async step(name: string, input: ort.Tensor): Promise<Feeds> {
    this.length += input.dims[1];
    const feeds: Feeds = { ...this.past, [name]: input, attention_mask: ones(this.rows, this.length) };
    if (this.states) {
      feeds.encoder_hidden_states = this.states;
      feeds.encoder_attention_mask = ones(this.rows, this.sourceLength);
    }
    const output = await this.graph.run(feeds);
    for (const key of Object.keys(output))
      if (key.startsWith("present.")) this.past[key.replace("present.", "past_key_values.")] = output[key];
    return output;
  }

  /** Keep these rows in this order, as beam search does. The first step has made keys and values of the states. */
  reorder(rows: number[]): void {
    this.rows = rows.length;
    if (this.states) this.states = floats(new Float32Array(0), [rows.length, 0, this.states.dims[2]]);
    for (const [name, tensor] of Object.entries(this.past)) {
      const data = tensor.data as Float32Array;
      const size = data.length / tensor.dims[0];
      const next = new Float32Array(rows.length * size);
      rows.forEach((row, at) => next.set(data.subarray(row * size, (row + 1) * size), at * size));
      this.past[name] = floats(next, [rows.length, ...tensor.dims.slice(1)]);
    }
  }
}

/** The attention weights among the outputs, layer by layer, of one row of the batch. */
export function weightsOf(output: Feeds, row = 0): Weights {
  const names = Object.keys(output).filter((name) => name.includes("attentions."));
  names.sort((one, other) => Number(one.split(".")[1]) - Number(other.split(".")[1]));
  return names.map((name) => {
    const [, heads, rows, columns] = output[name].dims;
    const size = heads * rows * columns;
    return { heads, rows, columns, data: (output[name].data as Float32Array).slice(row * size, (row + 1) * size) };
  });
}

/** The weights of several steps below each other. */
export function stacked(steps: Weights[]): Weights {
  return (steps[0] ?? []).map(({ heads, columns }, layer) => {
    const data = new Float32Array(heads * steps.length * columns);
    for (let head = 0; head < heads; head++)
      steps.forEach((step, row) =>
        data.set(step[layer].data.subarray(head * columns, (head + 1) * columns), (head * steps.length + row) * columns),
      );
    return { heads, rows: steps.length, columns, data };
  });
}

/** The mean of the heads in the last row of each layer: what the newest token attends to. */
export function lastRow(weights: Weights): Float32Array[] {
  return weights.map(({ heads, rows, columns, data }) => {
    const mean = new Float32Array(columns);
    for (let head = 0; head < heads; head++)
      for (let at = 0; at < columns; at++) mean[at] += data[(head * rows + rows - 1) * columns + at] / heads;
    return mean;
  });
}

/** log p of the last row [.., n, V] of logits, without the rows that only pad the vocabulary. */
export function logProbabilities(logits: ort.Tensor, size: number, row = 0): Float64Array {
  const width = logits.dims[2];
  const start = ((row + 1) * logits.dims[1] - 1) * width;
  return logSoftmax((logits.data as Float32Array).subarray(start, start + Math.min(size, width)));
}

export function logSoftmax(values: ArrayLike<number>): Float64Array {
  let most = -Infinity;
  for (let at = 0; at < values.length; at++) most = Math.max(most, values[at]);
  let sum = 0;
  for (let at = 0; at < values.length; at++) sum += Math.exp(values[at] - most);
  const log = Math.log(sum) + most;
  return Float64Array.from(values, (value) => value - log);
}

/** The indices of the largest values, largest first. */
export function best(values: Float64Array, count: number): number[] {
  const found: number[] = [];
  for (let at = 0; at < values.length; at++) {
    if (found.length === count && !(values[at] > values[found[count - 1]])) continue;
    let place = found.length;
    while (place > 0 && values[at] > values[found[place - 1]]) place--;
    found.splice(place, 0, at);
    if (found.length > count) found.pop();
  }
  return found;
}
