/* The state of the page: the model, the input, and the request in progress. The key is kept in memory only. */

import { currentLanguage } from "../lib/words.svelte";
import { events, fetchModels, Refused, send } from "./server";
import { makeCall, notANumber, SETTINGS, tasksOf, withoutHeader, type Call, type Model, type Task } from "./tasks";

export interface ScoredText {
  text: string;
  score: number;
  log_probability: number;
}
export interface Output {
  note?: string | null;
  n_best?: ScoredText[];
  alignment?: [number, number][]; // (source word, target word)
  label?: string;
  probabilities?: Record<string, number>;
  words?: { word: string; tag: string; probability: number; start: number; end: number }[];
  entities?: { type: string; text: string; start: number; end: number; probability: number }[];
  masks?: { token: string; probability: number }[][];
  values?: number[][];
}
export interface Result {
  task: Task;
  call: Call;
  inputs: string[]; // one per output; an image is its data URL
  outputs: Output[];
  vectors: number[][];
  samples: { text: string; reason: string | null }[];
  first: number | null; // milliseconds until the first token
  seconds: number | null; // until the end
  tokens: number | null; // generated
  raw: unknown;
}
interface Picked {
  name: string;
  url: string; // a data URL
  size?: string; // in pixels, if it was made smaller
}
export type Problem = { kind: "refused"; message: string; status: number; until: number } | { kind: "gone" };
interface Chunk {
  error?: { message: string };
  choices: { index: number; text: string; finish_reason: string | null }[];
  usage?: { completion_tokens: number };
}

const TASKS = Object.keys(SETTINGS) as Task[];

class Playground {
  models = $state.raw<Model[]>([]);
  loaded = $state(false); // the models are known
  name = $state("");
  task = $state<Task>("generate");
  texts = $state(Object.fromEntries(TASKS.map((task) => [task, ""])) as Record<Task, string>);
  image = $state.raw<Picked | null>(null);
  values = $state(
    Object.fromEntries(
      TASKS.map((task) => [task, Object.fromEntries(SETTINGS[task].map((one) => [one.name, one.value]))]),
    ) as Record<Task, Record<string, string>>,
  );
  key = $state("");
  needsKey = $state(false);
  busy = $state(false);
  cancelled = $state(false);
  problem = $state.raw<Problem | null>(null);
  result = $state<Result | null>(null);
  private control: AbortController | null = null;

  get model(): Model | undefined {
    return this.models.find((one) => one.id === this.name);
  }
  get readsImages(): boolean {
    return this.task !== "embed" && this.model?.input === "image";
  }
  get input(): string {
    return this.readsImages ? (this.image?.url ?? "") : this.texts[this.task];
  }
  /** The request that the button sends, as the copied programs send it; null: there is nothing to send. */
  get call(): Call | null {
    if (this.model?.status !== "ready" || !this.input.trim() || this.stray !== undefined) return null;
    return makeCall(this.name, this.task, this.input, this.values[this.task]);
  }
  /** A word of the input that should be a number. */
  get stray(): string | undefined {
    return this.task === "predict" ? notANumber(this.input) : undefined;
  }

  /** Read the models, and again while one is loading. */
  async load(): Promise<void> {
    try {
      this.models = await fetchModels(this.key);
      if (!this.loaded) this.problem = null; // that of an earlier attempt
      this.loaded = true;
      this.needsKey = this.key !== "";
    } catch (error) {
      this.fail(error);
      if (!(error instanceof Refused)) setTimeout(() => void this.load(), 3000);
      return;
    }
    if (!this.model) this.choose((this.models.find((one) => one.status === "ready") ?? this.models[0])?.id ?? "");
    else if (!tasksOf(this.model).includes(this.task)) this.choose(this.name);
    if (this.models.some((one) => one.status === "loading")) setTimeout(() => void this.load(), 1000);
  }

  choose(name: string): void {
    this.name = name;
    const tasks = tasksOf(this.model);
    if (tasks.length) this.chooseTask(tasks[0]);
  }

  chooseTask(task: Task): void {
    this.cancel();
    this.task = task;
    this.result = null;
    this.problem = null;
    this.cancelled = false;
  }

  cancel(): void {
    this.control?.abort();
  }

  async send(): Promise<void> {
    const { call, task } = this;
    if (!call || this.busy) return;
    const control = new AbortController();
    this.control = control;
    this.busy = true;
    this.cancelled = false;
    this.problem = null;
    const input = call.body.input;
    const inputs = task === "predict" ? [this.input] : ([] as unknown[]).concat(input ?? []).map(String);
    const empty = { outputs: [], vectors: [], samples: [], first: null, seconds: null, tokens: null, raw: null };
    this.result = { task, call, inputs, ...empty };
    const result = this.result; // the reactive one
    const began = performance.now();
    try {
      const response = await send(call, this.key, control.signal);
      if (task === "generate") await this.receive(result, response, began);
      else {
        result.raw = await response.json();
        if (task === "embed") {
          const { data } = result.raw as { data: { embedding: number[] }[] };
          result.vectors = data.map((one) => one.embedding);
        } else result.outputs = (result.raw as { outputs: Output[] }).outputs;
      }
      result.seconds = (performance.now() - began) / 1000;
    } catch (error) {
      if (control.signal.aborted) this.cancelled = this.result === result;
      else this.fail(error);
    } finally {
      if (this.control === control) this.busy = false;
    }
  }

  /** Add every token to its sample as it arrives. */
  private async receive(result: Result, response: Response, began: number): Promise<void> {
    for await (const event of events(response)) {
      const chunk = event as unknown as Chunk;
      if (chunk.error) throw new Refused(chunk.error.message, 200);
      result.first ??= performance.now() - began;
      for (const { index, text, finish_reason } of chunk.choices) {
        while (result.samples.length <= index) result.samples.push({ text: "", reason: null });
        result.samples[index].text += text;
        result.samples[index].reason = finish_reason;
      }
      if (chunk.usage) result.tokens = chunk.usage.completion_tokens;
    }
  }

  private fail(error: unknown): void {
    if (error instanceof Refused) {
      if (error.status === 401) this.needsKey = true;
      const until = error.wait ? Date.now() + 1000 * error.wait : 0;
      this.problem = { kind: "refused", message: error.message, status: error.status, until };
    } else if (error instanceof TypeError) this.problem = { kind: "gone" };
    else throw error;
  }

  /** A file that was dropped or chosen: an image where the model reads images, else its text. */
  async take(file: File): Promise<void> {
    if (this.readsImages) {
      this.image = await readImage(file);
      return;
    }
    const { task } = this;
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    this.texts[task] = task === "predict" ? withoutHeader(text) : text;
  }
}

const LARGE = 2_000_000; // bytes: a server accepts 4,000,000, and base64 takes a third more
const SIDE = 1024; // pixels: models read fewer

/** An image as it is, or a large one, such as a photo, made smaller; an error if it is none. */
async function readImage(file: File): Promise<Picked> {
  const image = await createImageBitmap(file);
  if (file.size <= LARGE && file.type !== "image/avif") return { name: file.name, url: await dataUrl(file) };
  const scale = Math.min(1, SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(image.width * scale);
  canvas.height = Math.round(image.height * scale);
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return { name: file.name, url: canvas.toDataURL("image/jpeg", 0.92), size: `${canvas.width} × ${canvas.height}` };
}

/** A file as a data URL. */
function dataUrl(file: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error!);
    reader.readAsDataURL(file);
  });
}

/** A number in the reader's language. */
export function format(value: number, digits: number): string {
  const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return value.toLocaleString(currentLanguage(), options).replace("-", "−");
}

export const playground = new Playground();
