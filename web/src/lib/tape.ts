/* Responses on tape: a saved page has no server, and answers from the responses that it holds.

   While a page is being saved, `tape` records every response; in the saved page, `replay` gives them back. The key is
   the request: its path and its body. */

/** The responses of this page, base64 by request; null: there is a server. */
const saved = readSaved();
let tape: Map<string, string> | null = null;

export const standalone = saved !== null;

function readSaved(): Record<string, string> | null {
  const element = typeof document === "undefined" ? null : document.getElementById("regard-saved");
  return element ? (JSON.parse(element.textContent ?? "{}") as Record<string, string>) : null;
}

function keyOf(path: string, init: RequestInit): string {
  return typeof init.body === "string" ? `${path} ${init.body}` : path;
}

/** The saved response to a request; null: there is none. */
export function replay(path: string, init: RequestInit): Response | null {
  const text = saved?.[keyOf(path, init)];
  return text === undefined ? null : new Response(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
}

export async function keep(path: string, init: RequestInit, reply: Response): Promise<void> {
  if (tape === null || init.body instanceof Uint8Array) return;
  const bytes = new Uint8Array(await reply.clone().arrayBuffer());
  let letters = "";
  for (let at = 0; at < bytes.length; at += 32768) letters += String.fromCharCode(...bytes.subarray(at, at + 32768));
  tape?.set(keyOf(path, init), btoa(letters));
}

/** Record all responses while `work` runs, up to about `most` characters: `full` says when to stop. */
export async function record(most: number, work: (full: () => boolean) => Promise<void>): Promise<Record<string, string>> {
  const own = (tape = new Map<string, string>());
  const full = () => [...own.values()].reduce((sum, text) => sum + text.length, 0) > most;
  try {
    await work(full);
  } finally {
    tape = null;
  }
  return Object.fromEntries(own);
}
