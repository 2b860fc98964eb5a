/* The model computes in a worker, so that the page stays responsive. A newer request stops a generation. */

import { Graph, readJson, setFolder } from "./graph";
import type { Ask, Info, Tell } from "./info";
import { type Opened, Problem, look, run } from "./tasks";
import { Tokenizer } from "./tokenizer";

let model: Opened | null = null;
let latest = 0;

function tell(message: Tell): void {
  postMessage(message);
}

async function open(folder: string): Promise<void> {
  setFolder(folder);
  const info: Info = await readJson("page.json");
  const [source, target] = await Promise.all([
    info.input === "tokens" ? readJson("tokenizer.json") : null,
    info.target ? readJson("target/tokenizer.json") : info.task === "caption" ? readJson("tokenizer.json") : null,
  ]);
  let bytes = 0;
  const graphs = await Promise.all(
    info.graphs.map((name) => Graph.open(info, name, (more) => tell({ kind: "progress", bytes: (bytes += more) / info.bytes }))),
  );
  const reader = source && new Tokenizer(source);
  model = { info, source: reader, target: target ? new Tokenizer(target) : reader, encoder: graphs[0], decoder: graphs.at(-1)! };
  tell({ kind: "ready", info });
}

async function answer(ask: Ask): Promise<void> {
  const number = ask.kind === "open" ? 0 : ask.number;
  try {
    if (ask.kind === "open") return await open(ask.folder);
    if (latest !== number) return; // a newer one waits
    const began = performance.now();
    const result =
      ask.kind === "image"
        ? await look(model!, ask.pixels, ask.width, ask.height, ask.beam)
        : await run(model!, ask.options, (token, text, prompt) => {
            tell({ kind: "token", number, token, text, prompt });
            return latest === number;
          });
    tell({ kind: "result", number, result: { ...result, milliseconds: performance.now() - began } });
  } catch (error) {
    const known = error instanceof Problem;
    tell({ kind: "error", number, code: known ? error.code : "failed", detail: known ? error.detail : String(error) });
  }
}

let queue = Promise.resolve();
onmessage = ({ data }: MessageEvent<Ask | { kind: "stop" }>) => {
  if (data.kind === "stop") latest = -1;
  else {
    if (data.kind !== "open") latest = data.number;
    const ask = data;
    queue = queue.then(() => answer(ask));
  }
};
