/* Export: the view as SVG or PNG, its values as JSON. */

import { ONE, plainBlocks, spaceOf, type Block, type HeadMap } from "./look";
import { compact, toLink, type View } from "./ask";
import type { Explorer } from "./explorer.svelte";
import { exported } from "./analysis.svelte";
import { draw } from "./figure";
import { generation } from "./generation.svelte";
import { say } from "./words.svelte";

/** The answers of the server that a view shows. */
const ANSWERS: Partial<Record<View, string[]>> = {
  lens: ["lens"],
  attribution: ["attribution", "saliency", "scores"],
  patching: ["patching", "patched"],
  neurons: ["neurons"],
  embeddings: ["embeddings", "neighbours", "position"],
  flow: ["flow"],
  model: ["roles"],
  training: ["training"],
};

function download(content: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function fileName(explorer: Explorer, view: string, ending: string): string {
  const { part, head, ask } = explorer;
  const where = part && view !== "model" && view !== "search" ? `-${part.part}-${part.layer}-${head ?? "mean"}` : "";
  return `${(ask.run || "regard").replace(/[^\p{L}\p{N}._-]+/gu, "-")}-${view}${where}.${ending}`;
}

export async function saveFigure(explorer: Explorer, view: View, kind: "svg" | "png"): Promise<void> {
  const figure = draw(explorer, view);
  if (!figure) return explorer.fail(new Error(say(view === "generate" ? "generateNothing" : "nothingToSave")));
  const svg = new Blob([figure.svg], { type: "image/svg+xml" });
  if (kind === "svg") return download(svg, fileName(explorer, view, "svg"));
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(figure.svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  const scale = Math.min(2, 8000 / Math.max(figure.width, figure.height));
  canvas.width = Math.ceil(figure.width * scale);
  canvas.height = Math.ceil(figure.height * scale);
  const pen = canvas.getContext("2d")!;
  pen.scale(scale, scale);
  pen.drawImage(image, 0, 0, figure.width, figure.height);
  canvas.toBlob((png) => png && download(png, fileName(explorer, view, "png")), "image/png");
}

/** The page with its current state as one file. */
export async function savePage(explorer: Explorer): Promise<void> {
  const { standalonePage } = await import("./standalone");
  const content = await standalonePage(explorer);
  download(new Blob([content], { type: "text/html" }), fileName(explorer, explorer.ask.view, "html"));
}

/** An answer of the server as plain numbers. */
function plainAnswer(name: string): unknown {
  const answer = exported.answers.get(name) as { arrays?: unknown; blocks?: Map<string, Block> } | undefined;
  if (!(answer?.blocks instanceof Map)) return answer;
  const { arrays: _, blocks, ...rest } = answer;
  return { ...rest, ...plainBlocks(blocks) };
}

/** Rows of weights as plain numbers. */
function plain(map: HeadMap): number[][] {
  const number = (value: number) => Number((value / ONE).toFixed(6));
  return Array.from({ length: map.rows }, (_, row) =>
    Array.from(map.values.subarray(row * map.columns, (row + 1) * map.columns), number),
  );
}

/** All heads of the response; of a long text, which came as an overview, those that were opened. */
function allMaps(explorer: Explorer): object[] {
  const { shown } = explorer;
  return (shown?.parts ?? []).map((part) => ({
    part: part.part,
    layer: part.layer,
    rows: shown!.labels[part.rows],
    columns: shown!.labels[part.columns],
    heads: Array.from({ length: part.heads }, (_, head) => {
      const map = explorer.mapOf(part, head);
      return map && plain(map); // null: not loaded
    }),
  }));
}

/** The stages of the query that the view shows. */
function stepsOf(explorer: Explorer): object | undefined {
  const { steps, part, rows } = explorer;
  if (explorer.ask.view !== "steps" || !steps || !part) return undefined;
  const at = explorer.selected[spaceOf(part.rows)];
  return { query: at, token: rows[at], scale: steps.scale, stages: plainBlocks(steps.blocks) };
}

/** The data of the view: the request, the current map with its labels, all heads, and the output. */
export function saveNumbers(explorer: Explorer): void {
  const { ask, part, head, map, rows, columns } = explorer;
  const weights = map && plain(map);
  const content = {
    run: ask.run,
    text: ask.text,
    target: ask.target,
    changes: compact(ask.changes),
    link: toLink(ask),
    map: part && { part: part.part, layer: part.layer, head, rows, columns, weights },
    maps: allMaps(explorer),
    steps: stepsOf(explorer),
    output: (explorer.touched ? explorer.after : explorer.before)?.output ?? null,
    search: ask.view === "search" ? explorer.tree : undefined,
    generation: ask.view === "generate" ? { sampling: ask.sampling, steps: generation.steps } : undefined,
    compare: ask.view === "compare" ? [...exported.maps].map(([name, one]) => ({ name, rows: one.rows, columns: one.columns, weights: plain(one.map) })) : undefined,
    tables: [...exported.tables.values()].map(({ title, rows, columns, texts }) => ({ title, rows, columns, texts })),
    analysis: Object.fromEntries((ask.view === "model" && ask.grid !== "roles" ? [] : (ANSWERS[ask.view] ?? [])).map((name) => [name, plainAnswer(name)])),
  };
  download(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }), fileName(explorer, "numbers", "json"));
}
