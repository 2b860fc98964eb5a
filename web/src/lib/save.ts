/* Export: the view as SVG or PNG, its values as JSON. */

import { ONE } from "./look";
import { compact, toLink, type View } from "./ask";
import type { Explorer } from "./explorer.svelte";
import { draw } from "./figure";

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
  if (!figure) return;
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

/** The data of the view: the request, the current map with its labels, and the output. */
export function saveNumbers(explorer: Explorer): void {
  const { ask, part, head, map, rows, columns } = explorer;
  const weights = map
    ? Array.from({ length: map.rows }, (_, row) =>
        Array.from(map.values.subarray(row * map.columns, (row + 1) * map.columns), (value) => Number((value / ONE).toFixed(6))),
      )
    : null;
  const content = {
    run: ask.run,
    text: ask.text,
    target: ask.target,
    changes: compact(ask.changes),
    link: toLink(ask),
    map: part && { part: part.part, layer: part.layer, head, rows, columns, weights },
    output: (explorer.touched ? explorer.after : explorer.before)?.output ?? null,
    search: ask.view === "search" ? explorer.tree : undefined,
  };
  download(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }), fileName(explorer, "numbers", "json"));
}
