/* Requests to the server of this page. All URLs are relative, so they contain its token. */

import type { Flow } from "./flow";
import { parseFrame, type Look, type Block, type Header, type PartName, type Question, type Space } from "./look";
import { compact, type Ask, type Sampling } from "./ask";
import { keep, replay, standalone } from "./tape";
import { say } from "./words.svelte";

export interface RunInfo {
  name: string;
  title: string;
  architecture: Look["architecture"] | null; // null: known once the model is loaded
  input: "tokens" | "patches" | "features" | null;
  layers: number | null;
  heads: number | null;
  dim: number | null;
  size: number | null; // pixels per side of an image
  examples: Example[] | null; // of its own test data; null: `examples` asks for some, once the model is loaded
  error: string | null; // why this folder cannot be opened
  generator: string | null; // of generated data: "korean-dates" is the demo's
  snapshots: number[]; // steps of training whose weights are kept
}

/** What `regard heads` measures about one head. */
export interface Role {
  part: PartName;
  layer: number;
  head: number;
  pattern: string;
  score: number; // fraction of the attention that follows the pattern
  loss_change: number | null; // when the head is off; null: not measured
  gradient: number | null;
}

export interface Roles {
  examples: number;
  own: boolean; // examples of the run; otherwise this input alone
  heads: Role[];
}

/** The heads of one layer, each off once: [heads, positions]. */
export interface Off {
  arrays: [];
  heads: number[];
  labels: string[]; // the tokens whose probability is compared
  blocks: Map<string, Block>;
}

export interface Training {
  snapshots: number[];
  curves: Record<"loss" | "valid_loss", [number, number][]>;
}

/** An input to begin with; an image by the name under which the server keeps it. */
export interface Example {
  text?: string;
  image?: string;
  target: string | null; // the correct output
}

export interface Steps {
  arrays: { name: string; type: "f4"; shape: number[]; offset: number }[];
  blocks: Map<string, Block>;
  scale: number;
}

export interface TreeNode {
  id: number;
  parent: number | null;
  token: string;
  probability: number;
  total: number; // sum of log probabilities up to here
  kept: boolean; // kept in the beam after its step
  ended: boolean;
  best: boolean; // an ancestor of the best hypothesis
}

export interface Tree {
  nodes: TreeNode[];
  found: { text: string; score: number; log_probability: number }[];
}

/** The server refused the request; its message is shown to the user. */
export class Refused extends Error {}
/** The server did not respond. */
export class Gone extends Error {}
/** A server responds, but the address of this page is not its own: it has been restarted. */
export class Replaced extends Error {}

const BUSY = 503;
const PATIENCE = 20; // times that a request is sent to a busy server

/** A newer request has replaced this one. */
export class Aborted extends Error {}

async function send(path: string, init: RequestInit): Promise<Response> {
  const saved = replay(path, init);
  if (saved) return saved;
  if (standalone) throw new Refused(say("savedOnly"));
  let reply: Response;
  for (let attempt = 1; ; attempt++) {
    try {
      reply = await fetch(path, { cache: "no-store", ...init });
    } catch (error) {
      if (init.signal?.aborted) throw new Aborted();
      throw new Gone(String(error));
    }
    if (reply.status !== BUSY || attempt >= PATIENCE) break;
    await new Promise((done) => setTimeout(done, 1000 * Number(reply.headers.get("Retry-After") ?? 1)));
  }
  if (reply.ok) {
    await keep(path, init, reply);
    return reply;
  }
  if (reply.status === 403) throw new Replaced();
  let message = `${reply.status} ${reply.statusText}`;
  try {
    const body: unknown = await reply.json();
    if (body && typeof body === "object" && "error" in body) message = String(body.error);
  } catch {
    /* no message: use the status */
  }
  throw new Refused(message);
}

function post(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  return send(path, init);
}

export function question(ask: Ask, touched: boolean): Question {
  const { run, step, text, target, image, changes } = ask;
  return { run, step, text, target, image, changes: touched ? compact(changes) : {} };
}

export async function runs(): Promise<{ runs: RunInfo[]; version: string; command: string }> {
  return (await send("api/runs", {})).json();
}

export async function examples(run: string): Promise<Example[]> {
  return (await post("api/examples", { run })).json();
}

export async function alive(): Promise<void> {
  await send("api/alive", {});
}

/** The response that `web/prepare.py` has recorded. */
export async function prepared(): Promise<Look> {
  const question = { run: "", step: null, text: "March 3rd, 2021", target: null, image: null, changes: {} };
  return { ...parseFrame<Header>(await (await send("example.bin", {})).arrayBuffer()), question };
}

export async function look(question: Question, signal?: AbortSignal): Promise<Look> {
  return { ...parseFrame<Header>(await (await post("api/look", question, signal)).arrayBuffer()), question };
}

/** Whole maps of some heads, [heads, rows, columns]. */
export async function maps(asked: Question & { part: string; layer: number; heads: number[] }): Promise<Block> {
  const frame = parseFrame<{ arrays: [] }>(await (await post("api/maps", asked)).arrayBuffer());
  return frame.blocks.get("maps")!;
}

export async function steps(asked: Question & { part: string; layer: number; head: number; query: number }): Promise<Steps> {
  return parseFrame<Steps>(await (await post("api/steps", asked)).arrayBuffer());
}

/** Every activation of the selected tokens. */
export async function flow(asked: Question & { at: Partial<Record<Space, number>> }): Promise<Flow> {
  return parseFrame<Flow>(await (await post("api/flow", asked)).arrayBuffer());
}

/** One generated token. */
export interface GenerationStep {
  id: number;
  label: string;
  text: string; // the output so far
  choices: { id: number; label: string; probability: number; kept: number }[];
  count: number; // tokens that could be sampled
  cut: number; // probability of the others
  uniform: number;
  cache: { tokens: number; used: number; memory: number; layers: number[] };
  ended: boolean;
}

export async function generate(
  asked: Question & { prefix: number[]; count: number; sampling: Sampling },
): Promise<GenerationStep[]> {
  return (await post("api/generate", asked)).json();
}

export async function search(asked: Question & { beam: number }): Promise<Tree> {
  return (await post("api/search", asked)).json();
}

export async function roles(asked: Question): Promise<Roles> {
  return (await post("api/roles", asked)).json();
}

export async function off(asked: Question & { part: PartName; layer: number }): Promise<Off> {
  return parseFrame<Off>(await (await post("api/off", asked)).arrayBuffer());
}

export async function training(run: string): Promise<Training> {
  return (await send(`api/training/${encodeURIComponent(run)}`, {})).json();
}

/** An analysis of activations: JSON, or a frame with its arrays in `blocks`. */
export async function analysis<T>(path: string, body: object, signal?: AbortSignal): Promise<T> {
  const content = await (await post(`api/${path}`, body, signal)).arrayBuffer(); // of a saved page: without a type
  const text = new TextDecoder();
  if (text.decode(content.slice(0, 4)) === "RGRD") return parseFrame<T & { arrays: [] }>(content);
  return JSON.parse(text.decode(content)) as T;
}

/** Upload an image as size x size x RGB bytes; returns the name under which the server keeps it. */
export async function keepImage(pixels: Uint8Array): Promise<string> {
  const init = { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: pixels as BodyInit };
  const reply = await send("api/image", init);
  return ((await reply.json()) as { name: string }).name;
}

export async function fetchImage(name: string): Promise<Uint8Array> {
  return new Uint8Array(await (await send(`api/image/${encodeURIComponent(name)}`, {})).arrayBuffer());
}
