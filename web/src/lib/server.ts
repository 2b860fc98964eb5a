/* Requests to the server of this page. All URLs are relative, so they contain its token. */

import { parseFrame, type Look, type Block, type Header, type Question } from "./look";
import { compact, type Ask } from "./ask";

export interface RunInfo {
  name: string;
  title: string;
  architecture: Look["architecture"] | null; // null: known once the model is loaded
  input: "tokens" | "patches" | "features" | null;
  layers: number | null;
  heads: number | null;
  dim: number | null;
  size: number | null; // pixels per side of an image
  examples: string[];
  error: string | null; // why this folder cannot be opened
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

async function send(path: string, init: RequestInit): Promise<Response> {
  let reply: Response;
  try {
    reply = await fetch(path, { cache: "no-store", ...init });
  } catch (error) {
    throw new Gone(String(error));
  }
  if (reply.ok) return reply;
  let message = `${reply.status} ${reply.statusText}`;
  try {
    const body: unknown = await reply.json();
    if (body && typeof body === "object" && "error" in body) message = String(body.error);
  } catch {
    /* no message: use the status */
  }
  throw new Refused(message);
}

function post(path: string, body: unknown): Promise<Response> {
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return send(path, init);
}

export function question(ask: Ask, touched: boolean): Question {
  const { run, text, target, image, changes } = ask;
  return { run, text, target, image, changes: touched ? compact(changes) : {} };
}

export async function runs(): Promise<{ runs: RunInfo[]; version: string }> {
  return (await send("api/runs", {})).json();
}

export async function alive(): Promise<void> {
  await send("api/alive", {});
}

export async function prepared(): Promise<Look> {
  const question = { run: "", text: "", target: null, image: null, changes: {} };
  return { ...parseFrame<Header>(await (await send("example.bin", {})).arrayBuffer()), question };
}

export async function look(question: Question): Promise<Look> {
  return { ...parseFrame<Header>(await (await post("api/look", question)).arrayBuffer()), question };
}

/** Whole maps of some heads, [heads, rows, columns]. */
export async function maps(asked: Question & { part: string; layer: number; heads: number[] }): Promise<Block> {
  const frame = parseFrame<{ arrays: [] }>(await (await post("api/maps", asked)).arrayBuffer());
  return frame.blocks.get("maps")!;
}

export async function steps(asked: Question & { part: string; layer: number; head: number; query: number }): Promise<Steps> {
  return parseFrame<Steps>(await (await post("api/steps", asked)).arrayBuffer());
}

export async function search(asked: Question & { beam: number }): Promise<Tree> {
  return (await post("api/search", asked)).json();
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
