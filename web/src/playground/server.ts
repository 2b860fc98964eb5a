/* Requests to the server of this page. */

import { currentLanguage } from "../lib/words.svelte";
import type { Call, Model } from "./tasks";

/** The server refused a request: its message, the status, and for 429 and 503 after how many seconds to try again. */
export class Refused extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly wait = 0,
  ) {
    super(message);
  }
}

/** The language of messages is that of the page, which may be another than the browser's. */
function ownHeaders(key: string): Record<string, string> {
  return { "Accept-Language": currentLanguage(), ...(key && { Authorization: `Bearer ${key}` }) };
}

async function check(response: Response): Promise<Response> {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    const { error } = (await response.json()) as { error: string | { message: string } };
    message = typeof error === "string" ? error : error.message;
  } catch {
    /* no message: the status says what is known */
  }
  throw new Refused(message, response.status, Number(response.headers.get("Retry-After") ?? 0));
}

export async function fetchModels(key: string): Promise<Model[]> {
  const response = await check(await fetch("v1/models", { cache: "no-store", headers: ownHeaders(key) }));
  return ((await response.json()) as { data: Model[] }).data;
}

export async function send(call: Call, key: string, signal: AbortSignal): Promise<Response> {
  const headers = { "Content-Type": "application/json", ...ownHeaders(key) };
  return check(await fetch(call.path, { method: "POST", headers, body: JSON.stringify(call.body), signal }));
}

/** The server-sent events of a response, parsed, until [DONE]. */
export async function* events(response: Response): AsyncGenerator<Record<string, unknown>> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop()!;
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data) as Record<string, unknown>;
    }
  }
}
