/* A page in one file: this page with the responses of its current state inside, for slides and blog posts.

   It opens from disk and needs no server and no network. What it can still do is what was recorded: the views of the
   current input with its second side, each head on or off, the steps of all queries of the current head, a generation
   with the current options, the snapshots of training. */

import type { Patching } from "./analysis.svelte";
import { compact, toLink } from "./ask";
import type { Explorer } from "./explorer.svelte";
import { AHEAD } from "./generation.svelte";
import { spaceOf, type Question } from "./look";
import { patchingQuestion, secondSide } from "./second";
import * as server from "./server";
import { record } from "./tape";

const MOST = 12_000_000; // characters of recorded responses
const TOKENS = 24; // of the generation
const CELLS = 160; // of the tables of patching, of which each is a pass

function escape(text: string): string {
  return text.replace(/</g, "\\u003c"); // no markup inside a script
}

async function tryTo(work: () => Promise<unknown>): Promise<void> {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof server.Refused)) throw error; // a view that this model does not have
  }
}

/** The requests of the views lens, attribution, neurons and embeddings for the selected token, as they send them. */
function analyses(explorer: Explorer, question: Question): [string, object][] {
  const { ask, before, part, outputSpace, selected } = explorer;
  const { run, step } = ask;
  const kind = before!.output.kind;
  const at = kind === "classes" ? 0 : selected[outputSpace];
  const stack = part?.part === "cross" ? "decoder" : part?.part;
  const positions = 64;
  return [
    ["lens", { ...question, first: Math.floor(at / positions) * positions, count: positions }],
    ["attribution", { ...question, at, token: null, minus: null }],
    ["saliency", { ...question, at, token: null }],
    ["scores", { run, step }],
    ["neurons", { ...question, stack, layer: part?.layer ?? 0, unit: ask.unit }],
    ["embeddings", { run, step, side: kind === "target" ? (before!.size === null ? "source" : "target") : null }],
    ["position", { run, step, stack: null, length: positions }],
  ];
}

type Once = (work: () => Promise<unknown>) => Promise<void>;

/** The tables of patching, and the output for each of their cells. */
async function rehearsePatching(explorer: Explorer, once: Once): Promise<void> {
  const asked = patchingQuestion(explorer);
  if (!asked) return;
  await once(async () => {
    const { residual, heads } = await server.analysis<Patching>("patching", asked);
    const cells = [
      ...Object.entries(residual).flatMap(([stack, rows]) => rows.flatMap((row, layer) => row.map((_, position) => ({ stack, layer: layer - 1, position, head: null })))),
      ...Object.entries(heads).flatMap(([stack, rows]) => rows.flatMap((row, layer) => row.map((_, head) => ({ stack, layer, position: 0, head })))),
    ];
    if (cells.length <= CELLS) for (const cell of cells) await once(() => server.analysis("patched", { ...asked, ...cell }));
  });
}

/** A generation from the start, as Generate and as Next token ask for it. */
async function rehearseGeneration(explorer: Explorer, question: Question, once: Once): Promise<void> {
  const { sampling } = explorer.ask;
  let prefix: number[] = [];
  let ended = false;
  while (!ended && prefix.length < TOKENS) {
    ended = true; // unless there is an answer
    await once(async () => {
      const steps = await server.generate({ ...question, prefix, count: AHEAD, sampling });
      for (const [at] of steps.entries())
        await once(() => server.generate({ ...question, prefix: [...prefix, ...steps.slice(0, at).map((step) => step.id)], count: 1, sampling }));
      prefix = [...prefix, ...steps.map((step) => step.id)];
      ended = steps.length === 0 || steps[steps.length - 1].ended;
    });
  }
}

/** Request what the saved page will ask for, the most important first. */
async function rehearse(explorer: Explorer, full: () => boolean): Promise<void> {
  const { ask, before, part, head, info } = explorer;
  if (!before) return;
  const plain = server.question(ask, false);
  const changed = explorer.touched ? server.question(ask, true) : plain;
  const once: Once = async (work) => (full() ? undefined : tryTo(work));
  await server.runs();
  await server.look(plain);
  if (explorer.touched) await server.look(changed);
  const second = secondSide(explorer);
  const pictures = [ask.image, second.image, ...(info?.examples ?? []).map((one) => one.image)];
  for (const name of new Set(pictures)) if (name) await once(() => server.fetchImage(name));
  await once(() => server.look(second));
  await rehearsePatching(explorer, once);
  if (part && !part.whole) await once(() => server.maps({ ...changed, part: part.part, layer: part.layer, heads: [head ?? 0] }));
  if (part && head !== null)
    for (let query = 0; query < explorer.rows.length; query++)
      await once(() => server.steps({ ...changed, part: part.part, layer: part.layer, head, query }));
  const at = { source: explorer.selected.source, target: explorer.selected.target };
  await once(() => server.flow({ ...changed, at: spaceOf(part?.rows ?? "source") === "source" && !before.labels.written ? { source: at.source } : at }));
  if (before.output.kind === "target") await once(() => server.search({ ...changed, beam: ask.beam }));
  if (["target", "next"].includes(before.output.kind)) await rehearseGeneration(explorer, changed, once);
  for (const [path, body] of analyses(explorer, changed)) await once(() => server.analysis(path, body));
  await once(() => server.roles(plain));
  for (const { part, layer } of before.parts) await once(() => server.off({ ...changed, part, layer }));
  for (const { part, layer, heads } of before.parts)
    for (let one = 0; one < heads; one++)
      await once(() => server.look({ ...changed, changes: compact({ ...ask.changes, heads: [...ask.changes.heads, [part, layer, one]] }) }));
  if (info?.snapshots.length) {
    await once(() => server.training(ask.run));
    const target = ask.target ?? before.output.before.generated;
    for (const step of info.snapshots) await once(() => server.look({ ...plain, target, step }));
  }
}

/** The saved page as a text. */
export async function standalonePage(explorer: Explorer): Promise<string> {
  const read = async (path: string) => {
    const reply = await fetch(path);
    if (!reply.ok) throw new server.Refused(`${path}: ${reply.status}`);
    return reply.text();
  };
  const [script, style] = await Promise.all([read("standalone/page.js"), read("standalone/page.css")]);
  const saved = await record(MOST, (full) => rehearse(explorer, full));
  const state = { ...explorer.ask, tour: null };
  return `<!doctype html>
<html lang="${document.documentElement.lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>${explorer.ask.run.replace(/[&<>]/g, "")} · Regard</title>
<style>${style.replace(/<\//g, "<\\/")}</style>
</head>
<body>
<div id="app"></div>
<script type="application/json" id="regard-link">${escape(JSON.stringify(toLink(state)))}</script>
<script type="application/json" id="regard-saved">${escape(JSON.stringify(saved))}</script>
<script type="module">${script.replace(/<\/(script)/gi, "<\\/$1")}</script>
</body>
</html>
`;
}
