/* The tasks of a server: their inputs, their settings, and the request that each becomes. */

export type Task = "generate" | "translate" | "classify" | "tag" | "fill" | "caption" | "predict" | "embed";

export interface Model {
  id: string;
  status: "ready" | "loading" | "failed";
  kind?: Task;
  input?: "text" | "image" | "numbers";
  embeddings?: boolean;
  languages?: [string, string]; // from, to
  channels?: number; // numbers per step
}

export interface Call {
  path: string; // relative to the page
  body: Record<string, unknown>;
}

export interface Setting {
  name: string; // of the field of the request
  type: "integer" | "number" | "text" | "boolean";
  value: string; // as it is typed; empty: the default of the model
  min?: number;
  max?: number;
  step?: number;
  only?: "sample" | "search"; // which way of decoding it belongs to
}

const SAMPLING: Setting[] = [
  { name: "temperature", type: "number", value: "1", min: 0.05, max: 100, step: 0.05, only: "sample" },
  { name: "top_k", type: "integer", value: "", min: 0, only: "sample" },
  { name: "top_p", type: "number", value: "", min: 0.05, max: 1, step: 0.05, only: "sample" },
  { name: "seed", type: "integer", value: "", min: 0, max: 2 ** 32 - 1, only: "sample" },
];
const SEARCH: Setting[] = [
  { name: "beam", type: "integer", value: "5", min: 1, max: 64, only: "search" },
  { name: "n_best", type: "integer", value: "3", min: 1, max: 64 },
  { name: "length_penalty", type: "number", value: "", min: -10, max: 10, step: 0.1, only: "search" },
  { name: "max_length", type: "integer", value: "", min: 1, max: 10_000 },
  { name: "sample", type: "boolean", value: "" },
  ...SAMPLING,
];
export const SETTINGS: Record<Task, Setting[]> = {
  generate: [
    { name: "max_tokens", type: "integer", value: "200", min: 1, max: 100_000 },
    { ...SAMPLING[0], min: 0, only: undefined },
    ...SAMPLING.slice(1).map((one) => ({ ...one, only: undefined })),
    { name: "n", type: "integer", value: "1", min: 1, max: 128 },
    { name: "stop", type: "text", value: "" },
  ],
  translate: [...SEARCH, { name: "alignments", type: "boolean", value: "" }],
  classify: [],
  tag: [],
  fill: [{ name: "top", type: "integer", value: "5", min: 1, max: 100 }],
  caption: SEARCH,
  predict: [{ name: "steps", type: "integer", value: "", min: 1, max: 10_000 }],
  embed: [],
};
export const EXAMPLES: Record<Task, string> = {
  generate: "Once upon a time",
  translate: "A man is riding a bicycle.",
  classify: "I would watch this again.",
  tag: "Ada Lovelace was born in London.",
  fill: "A <mask> is riding a bicycle.",
  caption: "",
  predict: "", // depends on the model: `series`
  embed: "A man is riding a bicycle.\nSomeone is cycling.\nThe soup is too hot.",
};
/** An example for a forecasting model: steps of a sine, each shifted from channel to channel. */
export function series(channels: number): string {
  const value = (at: number, channel: number) => (20 + 5 * Math.sin(at / 4 + channel)).toFixed(1);
  const step = (at: number) => Array.from({ length: channels }, (_, channel) => value(at, channel)).join(" ");
  return Array.from({ length: 96 }, (_, at) => step(at)).join(channels > 1 ? "\n" : " ");
}

const PATHS: Record<Exclude<Task, "generate" | "embed" | "predict">, string> = {
  translate: "v1/translate",
  classify: "v1/classify",
  tag: "v1/tag",
  fill: "v1/fill",
  caption: "v1/caption",
};

/** What a model can do; an encoder also has embeddings. */
export function tasksOf(model: Model | undefined): Task[] {
  if (!model?.kind) return [];
  return model.embeddings && model.kind !== "embed" ? [model.kind, "embed"] : [model.kind];
}

/** The settings that take part: with `sample`, not those of a search, and the other way round. */
export function activeSettings(task: Task, values: Record<string, string>): Setting[] {
  const off = values.sample ? "search" : "sample";
  return SETTINGS[task].filter((one) => one.only !== off);
}

/** The lines of a text that are not blank: each is one input. */
export function lines(text: string): string[] {
  return text.split(/\r?\n/).filter((line) => line.trim());
}

function words(line: string): string[] {
  return line.split(/[\s,;]+/).filter(Boolean);
}

/** The first word of a text that is not a number. */
export function notANumber(text: string): string | undefined {
  return words(text).find((word) => !Number.isFinite(Number(word)));
}

/** A table of numbers without its header and its columns of anything else, such as times; another text as it is. */
export function withoutHeader(text: string): string {
  const [header = "", ...rows] = lines(text);
  if (!rows.length || notANumber(header) === undefined) return text;
  const separator = /[,;\t]/.test(header) ? /[,;\t]/ : /\s+/;
  const isNumber = (cell: string) => cell.trim() !== "" && Number.isFinite(Number(cell));
  const kept = rows[0].split(separator).map(isNumber);
  if (!kept.includes(true)) return text;
  return rows.map((row) => row.split(separator).filter((_, at) => kept[at]).join(" ")).join("\n");
}

/** The numbers of a text: one list, or with several columns one list per line. */
export function numbers(text: string): number[] | number[][] {
  const rows = lines(text).map((line) => words(line).map(Number));
  return rows.length < 2 || rows.every((row) => row.length === 1) ? rows.flat() : rows;
}

/** The request for an input: a text, or the data URL of an image. */
export function makeCall(model: string, task: Task, input: string, values: Record<string, string>): Call {
  const options: Record<string, unknown> = {};
  for (const { name, type } of activeSettings(task, values)) {
    const value = values[name];
    if (!value.trim()) continue;
    options[name] = type === "text" ? value.replaceAll("\\n", "\n") : type === "boolean" ? true : Number(value);
  }
  if (task === "generate") {
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { path: "v1/completions", body: { model, prompt: input, ...options, ...stream } };
  }
  if (task === "embed") return { path: "v1/embeddings", body: { model, input: lines(input) } };
  if (task === "predict") return { path: "v1/forecast", body: { model, input: numbers(input), ...options } };
  const several = input.startsWith("data:image/") ? [input] : lines(input);
  return { path: PATHS[task], body: { model, input: several.length === 1 ? several[0] : several, ...options } };
}
