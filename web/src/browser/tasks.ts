/* What the model does with an input, as in `regard.predict`: one function for each command. */

import { Decoding, Graph, type Weights, best, floats, ids, lastRow, logProbabilities, logSoftmax, ones, stacked, weightsOf } from "./graph";
import { asInput } from "./image";
import type { Attention, Choice, Generated, Info, Options, Result } from "./info";
import { search } from "./search";
import type { Tokenizer } from "./tokenizer";

export interface Opened {
  info: Info;
  source: Tokenizer | null;
  target: Tokenizer | null;
  encoder: Graph;
  decoder: Graph; // the same as `encoder` where there is one graph
}

type Partial = Omit<Result, "milliseconds">;

/** A problem that the page says in the reader's language: its name among the words, and the numbers in it. */
export class Problem extends Error {
  constructor(
    readonly code: string,
    readonly detail = "",
  ) {
    super(code);
  }
}

const TOP = 8; // alternatives of a token that are shown

function checkLength(length: number, limit: number | null): void {
  if (limit !== null && length > limit) throw new Problem("tooLong", `${length},${limit}`);
}

async function decodeText(model: Opened, states: any, length: number, beam: number, source: string[]): Promise<Partial> {
  const { info, target } = model;
  const { decode } = info;
  const limit = Math.min(Math.trunc(decode.max_ratio * (info.input === "patches" ? 0 : length)) + 50, decode.max_length ?? Infinity);
  const decoding = new Decoding(model.decoder, states, length);
  const rules = { ...decode, beam, limit, begin: info.begin!, end: info.end!, size: target!.size };
  const found = await search(decoding, rules);
  const rows = found.tokens.map((id) => target!.token(id));
  const ended = found.weights.length > rows.length;
  const attention = { rows: ended ? [...rows, target!.token(info.end!)] : rows, columns: source, weights: stacked(found.weights) };
  return { text: target!.decode(found.tokens), log_probability: found.total, attention };
}

async function translate(model: Opened, { text, beam }: Options): Promise<Partial> {
  const read = [...model.source!.encode(text), model.info.source_end!];
  checkLength(read.length, model.info.source);
  const feeds = { input_ids: ids([read]), attention_mask: ones(1, read.length) };
  const states = (await model.encoder.run(feeds)).last_hidden_state;
  return decodeText(model, states, read.length, beam, read.map((id) => model.source!.token(id)));
}

async function caption(model: Opened, pixels: any, beam: number): Promise<Partial> {
  const states = (await model.encoder.run({ pixel_values: pixels })).last_hidden_state;
  return decodeText(model, states, states.dims[1], beam, Array.from({ length: states.dims[1] }, (_, at) => String(at)));
}

function probabilities(log: Float64Array, names: string[]): Choice[] {
  return best(log, names.length).map((at) => ({ token: names[at], probability: Math.exp(log[at]) }));
}

async function encode(model: Opened, read: number[]): Promise<{ logits: any; attention: Attention }> {
  const zeros = ids([read.map(() => 0)]);
  const output = await model.encoder.run({ input_ids: ids([read]), attention_mask: ones(1, read.length), token_type_ids: zeros });
  const tokens = read.map((id) => model.source!.token(id));
  return { logits: output.logits, attention: { rows: tokens, columns: tokens, weights: weightsOf(output) } };
}

async function classify(model: Opened, { text }: Options): Promise<Partial> {
  const { begin, end, source } = model.info;
  let read = [begin!, ...model.source!.encode(text), end!];
  if (source !== null && read.length > source) read = [...read.slice(0, source - 1), end!];
  const { logits, attention } = await encode(model, read);
  return { classes: probabilities(logSoftmax(logits.data), model.info.classes), attention };
}

async function classifyImage(model: Opened, pixels: any): Promise<Partial> {
  const output = await model.encoder.run({ pixel_values: pixels });
  const weights = weightsOf(output);
  const columns = Array.from({ length: weights[0]?.columns ?? 0 }, (_, at) => String(at));
  return { classes: probabilities(logSoftmax(output.logits.data as Float32Array), model.info.classes), attention: { rows: columns, columns, weights } };
}

async function fill(model: Opened, { text }: Options): Promise<Partial> {
  const { source: tokenizer, info } = model;
  const parts = text.replaceAll("[MASK]", "<mask>").split("<mask>");
  if (parts.length < 2) throw new Problem("noMask");
  const spaced = tokenizer!.hasSpaces; // a token includes the space before its word
  const read = [info.begin!];
  parts.forEach((part, at) => {
    if (at) read.push(info.mask!);
    read.push(...tokenizer!.encode(spaced && at < parts.length - 1 ? part.replace(/ $/, "") : part));
  });
  read.push(info.end!);
  checkLength(read.length, info.context);
  const { logits, attention } = await encode(model, read);
  const width = logits.dims[2];
  const masks = read.flatMap((id, at) => {
    if (id !== info.mask) return [];
    const log = logSoftmax(logits.data.subarray(at * width, (at + 1) * width));
    for (const special of tokenizer!.specials) log[special] = -Infinity;
    return [best(log.subarray(0, tokenizer!.size), TOP).map((one) => ({ token: tokenizer!.token(one), probability: Math.exp(log[one]) }))];
  });
  return { masks, attention };
}

/** A word with the punctuation around it split off; repeated marks stay together. */
function apart(word: string): string[] {
  const mark = "[.,;:!?…()\\[\\]{}<>\"'“”‘’«»。、，；：！？（）「」『』《》〈〉]";
  const [, before, middle, after] = new RegExp(`^(${mark}*)(.*?)(${mark}*)$`, "us").exec(word)!;
  const marks = (text: string) => text.match(/(.)\1*/gu) ?? [];
  return [...marks(before), ...(middle ? [middle] : []), ...marks(after)];
}

async function tag(model: Opened, { text }: Options): Promise<Partial> {
  const { source: tokenizer, info } = model;
  const words = (text.match(/[^\p{White_Space}]+/gu) ?? []).flatMap((word) => (info.punctuation === "attached" ? [word] : apart(word)));
  const space = tokenizer!.encode(" ");
  const longest = info.source ?? info.context;
  const read = [info.begin!];
  const first: number[] = [];
  words.forEach((word, at) => {
    const own = tokenizer!.encode((at ? " " : "") + word).slice(0, longest - 2);
    const spaced = at > 0 && own.length > space.length && space.every((id, i) => own[i] === id);
    first.push(read.length + (spaced ? space.length : 0));
    read.push(...own);
  });
  read.push(info.end!);
  checkLength(read.length, longest);
  const { logits, attention } = await encode(model, read);
  const width = logits.dims[2];
  const tags = words.map((word, at) => {
    const log = logSoftmax(logits.data.subarray(first[at] * width, (first[at] + 1) * width));
    const [top] = best(log, 1);
    return { word, tag: info.classes[top], probability: Math.exp(log[top]) };
  });
  return { tags, attention };
}

async function predict(model: Opened, { text, count }: Options): Promise<Partial> {
  const { mean, std, context, horizon } = model.info.numbers!;
  const lines = mean.length === 1 ? text.trim().split(/[\s,;]+/).map((one) => [one]) : text.trim().split("\n").map((line) => line.trim().split(/[\s,;]+/));
  const series = lines.map((line) => line.map(Number));
  if (!text.trim() || series.some((row) => row.length !== mean.length || !row.every(Number.isFinite)))
    throw new Problem("noNumbers", String(mean.length));
  if (context && series.length < context) throw new Problem("tooFew", `${series.length},${context}`);
  const read = series.slice(context ? -context : 0);
  const input = floats(Float32Array.from(read.flatMap((row) => row.map((value, at) => (value - mean[at]) / std[at]))), [1, read.length, mean.length]);
  const states = (await model.encoder.run({ input_features: input, attention_mask: ones(1, read.length) })).last_hidden_state;
  const decoding = new Decoding(model.decoder, states, read.length);
  let value = floats(new Float32Array(mean.length), [1, 1, mean.length]);
  const values: number[][] = [];
  const weights: Weights[] = [];
  const steps = count || (context ? horizon : read.length);
  for (let at = 0; at < steps; at++) {
    const output = await decoding.step("input_values", value);
    value = output.values as typeof value;
    values.push(Array.from(value.data as Float32Array, (one, c) => one * std[c] + mean[c]));
    weights.push(weightsOf(output));
    if (!at) decoding.reorder([0]);
  }
  const number = (row: number[]) => row.map((one) => String(Number(one.toPrecision(4)))).join(" ");
  return { series: { read, values }, attention: { rows: values.map(number), columns: read.map(number), weights: stacked(weights) } };
}

/** The next token: the most probable one, or a sample of the `top_k` most probable at this temperature. */
function choose(log: Float64Array, temperature: number, top: number): number {
  if (!temperature) return best(log, 1)[0];
  const kept = best(log, top || log.length);
  const scaled = logSoftmax(kept.map((id) => log[id] / temperature));
  let left = Math.random();
  for (let at = 0; at < kept.length; at++) if ((left -= Math.exp(scaled[at])) < 0) return kept[at];
  return kept[0];
}

async function generate(model: Opened, options: Options, tell: (token: Generated, text: string, prompt: string[]) => boolean): Promise<Partial> {
  const { info, source: tokenizer } = model;
  const read = tokenizer!.encode(options.text);
  if (!read.length) throw new Problem("empty");
  checkLength(read.length, info.context);
  const prompt = read.map((id) => tokenizer!.token(id));
  const decoding = new Decoding(model.decoder);
  const written: number[] = [];
  const room = Math.min(options.count, info.context - read.length + 1);
  let ended = options.count <= info.context - read.length + 1 ? "limit" : "context";
  for (let next = read; written.length < room; ) {
    const output = await decoding.step("input_ids", ids([next]));
    const log = logProbabilities(output.logits, tokenizer!.size);
    const id = choose(log, options.temperature, options.top_k);
    const choices = best(log, TOP).map((one) => ({ token: tokenizer!.token(one), probability: Math.exp(log[one]) }));
    if (id !== info.end) written.push(id);
    const token = { token: tokenizer!.token(id), probability: Math.exp(log[id]), choices, attends: lastRow(weightsOf(output)) };
    if (!tell(token, tokenizer!.decode(written), prompt)) return { text: tokenizer!.decode(written), prompt, ended: "stopped" };
    if (id === info.end) {
      ended = "end";
      break;
    }
    await new Promise((resolve) => setTimeout(resolve)); // so that a message to stop is read
    next = [id];
  }
  return { text: tokenizer!.decode(written), prompt, ended };
}

export async function run(model: Opened, options: Options, tell: (token: Generated, text: string, prompt: string[]) => boolean): Promise<Partial> {
  if (model.info.task !== "predict" && model.info.task !== "generate" && !options.text.trim()) throw new Problem("empty");
  switch (model.info.task) {
    case "translate":
      return translate(model, options);
    case "classify":
      return classify(model, options);
    case "fill":
      return fill(model, options);
    case "tag":
      return tag(model, options);
    case "predict":
      return predict(model, options);
    case "generate":
      return generate(model, options, tell);
  }
  throw new Error(model.info.task);
}

export async function look(model: Opened, rgba: Uint8ClampedArray, width: number, height: number, beam: number): Promise<Partial> {
  const { size, channels } = model.info.image!;
  const pixels = floats(asInput(rgba, width, height, channels, size), [1, Math.max(channels, 3), size, size]);
  return model.info.task === "caption" ? caption(model, pixels, beam) : classifyImage(model, pixels);
}
