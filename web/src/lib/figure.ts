/* Views as standalone SVG figures with inline colours, on a light or dark background. */

import { linkHorizontal } from "d3-shape";
import { blockName, largest, ONE, spaceOf, type HeadMap } from "./look";
import type { View } from "./ask";
import { exported, type NamedMap, type Near, type Units } from "./analysis.svelte";
import { changeColour, inkOn, palette, weightColour, type Theme } from "./colour";
import type { Explorer } from "./explorer.svelte";
import { generation } from "./generation.svelte";
import { binName, byDistance, byKey } from "./measure";
import { changePixels, dataUrl, pixels } from "./paint";
import { peak, Stages } from "./stages";
import { currentTheme } from "./theme.svelte";
import { headTitle, labelRoom, number, partTitle, stageTitles } from "./titles";
import { place } from "./tree";
import { say } from "./words.svelte";

export interface Figure {
  svg: string;
  width: number;
  height: number;
}

const SANS = "Pretendard, 'Noto Sans KR', 'Apple SD Gothic Neo', 'Malgun Gothic', 'Noto Sans CJK KR', sans-serif";
const INK = { light: "#1c2331", dark: "#e6e9ef" };
const MUTE = { light: "#5a6474", dark: "#9ba5b5" };
const GROUND = { light: "#ffffff", dark: "#12161d" };

const escapes: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

/** Text inside XML: markup is escaped, characters that XML forbids are replaced. */
function safe(text: string): string {
  return text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd").replace(/[&<>"]/g, (one) => escapes[one]);
}

function cut(text: string, most = 16): string {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

function text(x: number, y: number, label: string, fill: string, extra = ""): string {
  return `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" fill="${fill}" ${extra}>${safe(label)}</text>`;
}

function frame(narrow: number, height: number, title: string, theme: Theme, body: string): Figure {
  const width = Math.max(narrow, Math.ceil(32 + 16 * labelRoom(title)));
  const svg =
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ` +
    `font-family="${SANS}" font-size="12"><title>${safe(title)}</title>` +
    `<rect width="100%" height="100%" fill="${GROUND[theme]}"/>` +
    `${text(16, 24, title, INK[theme], 'font-size="15" font-weight="600"')}${body}</svg>`;
  return { svg, width, height };
}

export function draw(explorer: Explorer, view: View): Figure | null {
  const theme = currentTheme();
  switch (view) {
    case "model":
      if (explorer.ask.grid === "off") return drawTables(explorer, theme);
      return stack(drawModel(explorer, theme), explorer.ask.grid === "roles" ? drawTables(explorer, theme) : null);
    case "lines":
      return drawLines(explorer, theme);
    case "positions":
      return drawPositions(explorer, theme);
    case "search":
      return drawTree(explorer, theme);
    case "steps":
      return drawSteps(explorer, theme);
    case "image":
      return drawImage(explorer, theme);
    case "map":
      return drawHeat(explorer, theme);
    case "compare":
      return [...exported.maps].map(([name, one]) => heatMap(name, one, null, theme)).reduce(stack, null);
    case "lens":
    case "attribution":
    case "patching":
      return drawTables(explorer, theme);
    case "neurons":
      return drawUnit(theme);
    case "embeddings":
      return drawEmbeddings(explorer, theme);
    case "training":
      return stack(copyPicture(explorer, theme, "loss-curve"), drawModel(explorer, theme));
    case "generate":
      return drawGeneration(theme);
    case "flow":
      return copyPicture(explorer, theme, "flow-picture");
  }
}

/** Two figures, one below the other. */
function stack(one: Figure | null, other: Figure | null): Figure | null {
  if (!one || !other) return one ?? other;
  const [width, height] = [Math.max(one.width, other.width), one.height + other.height];
  const lower = other.svg.replace("<svg ", `<svg y="${one.height}" `);
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"><rect width="100%" height="100%" fill="${GROUND[currentTheme()]}"/>${one.svg}${lower}</svg>`;
  return { svg, width, height };
}

/** The pictures of token embeddings and positions as on the page, with the neighbours of a token. */
function drawEmbeddings(explorer: Explorer, theme: Theme): Figure | null {
  const pictures = [...document.querySelectorAll<HTMLCanvasElement>("#view canvas")].filter((one) => one.width && one.height);
  if (!pictures.length) return null;
  let [y, body] = [44, ""];
  for (const canvas of pictures) {
    const { width, height } = canvas.getBoundingClientRect();
    const high = Math.round((860 * height) / width);
    body += `<image x="16" y="${y}" width="860" height="${high}" preserveAspectRatio="none" image-rendering="pixelated" href="${canvas.toDataURL("image/png")}"/>`;
    y += high + 24;
  }
  const near = exported.answers.get("neighbours") as Near | undefined;
  if (near && explorer.ask.near) {
    body += text(16, y, say("neighboursOf", near.label), INK[theme], 'font-weight="600"');
    near.neighbours.forEach(([, label, cosine], at) => (body += text(16 + (at % 5) * 172, y + 22 + Math.floor(at / 5) * 20, `${cut(label)} ${number(cosine)}`, INK[theme])));
    y += 34 + Math.ceil(near.neighbours.length / 5) * 20;
  }
  return frame(892, y, `${explorer.ask.run} · ${say("embeddings")}`, theme, body);
}

/** The distribution of one generated token, before and after the sampling options. */
function drawGeneration(theme: Theme): Figure | null {
  const { step } = generation;
  if (!step) return null;
  const most = Math.max(...step.choices.flatMap((one) => [one.probability, one.kept]));
  let body = text(170, 52, say("generateBefore"), MUTE[theme]) + text(430, 52, say("generateAfter"), MUTE[theme]);
  step.choices.forEach((one, at) => {
    const y = 62 + at * 22;
    body += text(150, y + 12, cut(one.label), one.id === step.id ? weightColour(0.8, theme) : INK[theme], `text-anchor="end" font-weight="${one.id === step.id ? 700 : 400}"`);
    for (const [x, p] of [[170, one.probability], [430, one.kept]]) {
      body += `<rect x="${x}" y="${y}" width="${((190 * p) / most).toFixed(1)}" height="14" rx="3" fill="${weightColour(x > 200 ? 0.8 : 0.4, theme)}"/>`;
      body += text(x + 196, y + 12, number(p), MUTE[theme]);
    }
  });
  return frame(700, 80 + step.choices.length * 22, step.text.slice(-80), theme, body);
}

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight", "font-family"];

/** An SVG of the page as it is shown, with its styles as attributes. */
function copyPicture(explorer: Explorer, theme: Theme, id: string): Figure | null {
  const shown = document.getElementById(id) as SVGSVGElement | null;
  if (!shown) return null;
  const copy = shown.cloneNode(true) as SVGSVGElement;
  const [own, made] = [shown, copy].map((one) => [...one.querySelectorAll<SVGElement>("*")]);
  own.forEach((element, index) => {
    const style = getComputedStyle(element);
    made[index].removeAttribute("class");
    made[index].removeAttribute("style");
    for (const name of STYLES) made[index].setAttribute(name, style.getPropertyValue(name)); // the page forbids inline styles
  });
  const [width, height] = [shown.width.baseVal.value, shown.height.baseVal.value];
  const body = `<g transform="translate(16 44)">${new XMLSerializer().serializeToString(copy)}</g>`;
  return frame(width + 32, height + 60, `${explorer.shown?.run ?? ""} · ${explorer.ask.text}`.slice(0, 60), theme, body);
}

/** The tables of coloured cells on the page, one below the other. */
function drawTables(explorer: Explorer, theme: Theme): Figure | null {
  const high = 24;
  let [y, wide, body] = [44, 300, ""];
  for (const table of exported.tables.values()) {
    const longest = (labels: string[]) => Math.max(...labels.map((label) => 14 * labelRoom(label)));
    const [left, cell] = table.wide ?? [110, Math.max(54, Math.min(160, longest([...table.columns, ...table.texts.flat()])))];
    const letters = Math.floor(cell / 7);
    body += text(16, y + 14, table.title, INK[theme], 'font-weight="600"');
    y += 40;
    table.columns.forEach((label, at) => (body += text(left + (at + 0.5) * cell, y - 6, cut(label, letters), MUTE[theme], 'text-anchor="middle"')));
    table.rows.forEach((label, row) => {
      body += text(left - 8, y + 16, cut(label, Math.floor(left / 6.5)), INK[theme], 'text-anchor="end"');
      table.values[row].forEach((value, at) => {
        const shown = cut(table.texts[row][at] ?? "", letters);
        if (value === null) return void (body += text(left + (at + 0.5) * cell - 1, y + 15, shown, INK[theme], 'text-anchor="middle" font-size="11"'));
        const fraction = value / table.most;
        const back = table.signed ? changeColour(fraction, theme) : weightColour(fraction, theme);
        body += `<rect x="${left + at * cell}" y="${y}" width="${cell - 2}" height="${high - 2}" rx="3" fill="${back}"/>`;
        body += text(left + (at + 0.5) * cell - 1, y + 15, shown, inkOn(back), 'text-anchor="middle" font-size="11"');
      });
      y += high;
    });
    y += 18;
    wide = Math.max(wide, left + table.columns.length * cell + 16);
  }
  return exported.tables.size ? frame(wide, y, `${explorer.ask.run} · ${explorer.ask.text}`.slice(0, 90), theme, body) : null;
}

/** The activations of one unit, token by token. */
function drawUnit(theme: Theme): Figure | null {
  const units = exported.answers.get("neurons") as Units | undefined;
  if (!units) return null;
  const most = Math.max(1e-9, ...units.activations.map(Math.abs));
  let body = "";
  units.activations.forEach((value, at) => {
    const [x, y, back] = [16 + (at % 10) * 82, 44 + Math.floor(at / 10) * 42, changeColour(value / most, theme)];
    body += `<rect x="${x}" y="${y}" width="78" height="20" rx="3" fill="${back}"/>`;
    body += text(x + 39, y + 14, cut(units.labels[at], 10), inkOn(back), 'text-anchor="middle"');
    body += text(x + 39, y + 33, number(value, 2), MUTE[theme], 'text-anchor="middle" font-size="11"');
  });
  const name = `${say(units.stack)}, ${say("layer")} ${units.layer}, ${say("unit")} ${units.unit}`;
  return frame(840, 60 + Math.ceil(units.activations.length / 10) * 42, name, theme, body);
}

/** A vector as a row of small squares, as the page shows it. */
function strip(x: number, y: number, width: number, values: ArrayLike<number>, most: number, theme: Theme): string {
  const sheet = { values: new Float32Array(values.length), rows: 1, columns: values.length };
  const image = changePixels(sheet, { ...sheet, values }, most, palette("changes", theme));
  return `<image x="${x}" y="${y}" width="${width}" height="13" preserveAspectRatio="none" image-rendering="pixelated" href="${dataUrl(image)}"/>`;
}

/** One query stage by stage, the 60 keys with the largest weights. */
function drawSteps(explorer: Explorer, theme: Theme): Figure | null {
  const { steps, columns, part, rows } = explorer;
  if (!steps || !part) return null;
  const stages = new Stages(steps);
  const { scores, scaled, masked, weights, dotted, largestProduct, largestValue } = stages;
  const query = rows[explorer.selected[spaceOf(part.rows)]] ?? "";
  const keys = Array.from(weights, (_, key) => key).sort((one, other) => weights[other] - weights[one]);
  const shown = keys.slice(0, 60).sort((one, other) => one - other);
  const [top, high] = [104, 24];
  const end = 'text-anchor="end"';
  let body = text(16, 50, say("stepQ", query), INK[theme]) + strip(150, 40, 130, stages.q, peak(stages.q), theme);
  const names = stageTitles(stages, explorer.ask);
  body += [dotted ? names[0] : "", ...names.slice(1), say("stepWeights"), say("stepValues")]
    .map((label, at) => text([150, 350, 460, 540, 560, 810][at], top - 14, label, MUTE[theme], at > 0 && at < 4 ? end : ""))
    .join("");
  shown.forEach((key, row) => {
    const y = top + row * high + 8;
    body += text(16, y, cut(columns[key] ?? ""), INK[theme]);
    if (dotted) body += strip(150, y - 10, 130, stages.product(key), largestProduct, theme);
    [scores, scaled, masked].forEach((values, at) => (body += text([350, 460, 540][at], y, number(values[key], 2), INK[theme], end)));
    body += `<rect x="560" y="${y - 10}" width="${(180 * weights[key]).toFixed(1)}" height="13" rx="2" fill="${weightColour(0.8, theme)}"/>`;
    body += text(790, y, weights[key].toFixed(3), INK[theme], end);
    body += strip(810, y - 10, 130, stages.weighted(key, weights[key]), largestValue, theme);
  });
  const bottom = top + shown.length * high + 14;
  body += text(790, bottom, say("stepSum"), MUTE[theme], end) + strip(810, bottom - 10, 130, stages.output, largestValue, theme);
  return frame(960, bottom + 20, `${title(explorer)} · ${say("query")}: ${query}`, theme, body);
}

/** The image as it is on the page, its patches dimmed. */
function drawImage(explorer: Explorer, theme: Theme): Figure | null {
  const canvas = document.querySelector<HTMLCanvasElement>("#view canvas");
  if (!canvas) return null;
  const high = Math.round((480 * canvas.height) / canvas.width);
  const { part, rows } = explorer;
  const label = part ? `${say("query")}: ${rows[explorer.query ?? explorer.selected[spaceOf(part.rows)]] ?? ""}` : "";
  const body =
    `<image x="16" y="40" width="480" height="${high}" href="${canvas.toDataURL("image/png")}"/>` +
    text(16, high + 62, label, INK[theme], 'font-size="14"');
  return frame(512, high + 80, title(explorer), theme, body);
}

function drawHeat(explorer: Explorer, theme: Theme): Figure | null {
  const { map, original, rows, columns } = explorer;
  return map && heatMap(title(explorer), { map, rows, columns }, explorer.ask.show === "change" ? original : null, theme);
}

/** One map; with an original, its change. */
function heatMap(name: string, { map, rows, columns }: NamedMap, original: HeadMap | null, theme: Theme): Figure {
  const change = original !== null;
  const cell = Math.max(2, Math.min(26, 900 / map.columns));
  const every = Math.ceil(13 / cell);
  const room = (labels: string[]) => 8 * Math.min(16, Math.max(3, ...labels.map((label) => [...label].length)));
  const [left, top] = [30 + room(rows), 52 + room(columns)];
  let most = largest(map);
  if (change) most = map.values.reduce((far, value, at) => Math.max(far, Math.abs(value - original.values[at])), 0);
  const image = change
    ? changePixels(original, map, most, palette("changes", theme))
    : pixels(map, most, palette("weights", theme), map.rows, map.columns);
  const [wide, high] = [map.columns * cell, map.rows * cell];
  let body = `<image x="${left}" y="${top}" width="${wide}" height="${high}" preserveAspectRatio="none" image-rendering="pixelated" href="${dataUrl(image)}"/>`;
  rows.forEach((label, at) => {
    if (at % every === 0) body += text(left - 8, top + (at + 0.5) * cell + 4, cut(label), INK[theme], 'text-anchor="end"');
  });
  columns.forEach((label, at) => {
    const [x, y] = [left + (at + 0.5) * cell + 4, top - 8];
    if (at % every === 0) body += text(x, y, cut(label), INK[theme], `transform="rotate(-90 ${x} ${y})"`);
  });
  const colour = change ? (fraction: number) => changeColour(fraction * 2 - 1, theme) : (fraction: number) => weightColour(fraction, theme);
  body += legend(left, top + high + 20, change ? -most / ONE : 0, most / ONE, colour, theme);
  return frame(Math.ceil(left + Math.max(wide, 220) + 24), Math.ceil(top + high + 56), name, theme, body);
}

function legend(x: number, y: number, from: number, to: number, colour: (fraction: number) => string, theme: Theme): string {
  const bars = Array.from({ length: 24 }, (_, at) => `<rect x="${x + 40 + at * 5}" y="${y}" width="5.2" height="9" fill="${colour(at / 23)}"/>`);
  return text(x, y + 9, number(from, from ? 3 : 0), MUTE[theme]) + bars.join("") + text(x + 168, y + 9, number(to), MUTE[theme]);
}

function title(explorer: Explorer): string {
  const { part, shown } = explorer;
  if (!part || !shown) return "";
  const name = headTitle(explorer);
  return name.startsWith(partTitle(part.part, shown.parts)) ? name : `${partTitle(part.part, shown.parts)} · ${name}`;
}

function drawLines(explorer: Explorer, theme: Theme): Figure | null {
  const { map, rows, columns, query } = explorer;
  if (!map) return null;
  const high = 22;
  const [left, right, top] = [150, 470, 60];
  const curve = linkHorizontal<unknown, [number, number]>();
  let body = "";
  for (let from = 0; from < map.rows; from++) {
    if (query !== null && query !== from) continue;
    for (let to = 0; to < map.columns; to++) {
      const weight = map.values[from * map.columns + to] / ONE;
      if (weight < (query === null ? exported.faintest : 0.001)) continue;
      const path = curve({ source: [left + 8, top + (from + 0.5) * high], target: [right - 8, top + (to + 0.5) * high] });
      body += `<path d="${path}" fill="none" stroke="${weightColour(0.8, theme)}" stroke-width="${(0.6 + 3 * weight).toFixed(2)}" stroke-opacity="${(0.15 + 0.8 * weight).toFixed(2)}"/>`;
    }
  }
  rows.forEach((label, at) => (body += text(left, top + (at + 0.5) * high + 4, cut(label), at === query || query === null ? INK[theme] : MUTE[theme], 'text-anchor="end"')));
  columns.forEach((label, at) => {
    const weight = query === null ? 0 : map.values[query * map.columns + at] / ONE;
    body += text(right, top + (at + 0.5) * high + 4, cut(label) + (weight >= 0.005 ? `  ${number(weight, 2)}` : ""), INK[theme]);
  });
  if (query !== null) body += text(16, 42, `${say("query")}: ${rows[query] ?? ""}`, MUTE[theme]);
  return frame(right + 180, top + Math.max(map.rows, map.columns) * high + 20, title(explorer), theme, body);
}

function drawModel(explorer: Explorer, theme: Theme): Figure | null {
  const { shown } = explorer;
  if (!shown) return null;
  const heads = Math.max(...shown.parts.map((part) => part.heads));
  const cell = Math.max(40, Math.min(110, 1100 / heads));
  const [left, gap] = [44, 6];
  let y = 44;
  let body = "";
  let last = "";
  for (const part of shown.parts) {
    if (part.part !== last) {
      body += text(left, y + 14, partTitle(part.part, shown.parts), INK[theme], 'font-weight="600"');
      y += 26;
      last = part.part;
    }
    body += text(left - 12, y + cell / 2 + 4, String(part.layer), MUTE[theme], 'text-anchor="end"');
    const block = shown.blocks.get(blockName(part))!;
    const [, rows, columns] = block.shape;
    for (let head = 0; head < part.heads; head++) {
      const values = block.values.subarray(head * rows * columns, (head + 1) * rows * columns);
      const most = largest({ values });
      const image = pixels({ values, rows, columns }, most, palette("weights", theme), 2 * cell, 2 * cell);
      const off = explorer.isOff([part.part, part.layer, head]) || explorer.layerOff(part.part, part.layer);
      body += `<image x="${left + head * (cell + gap)}" y="${y}" width="${cell}" height="${cell}" preserveAspectRatio="none" image-rendering="pixelated" opacity="${off ? 0.2 : 1}" href="${dataUrl(image)}"/>`;
    }
    y += cell + gap;
  }
  return frame(left + heads * (cell + gap) + 18, y + 18, `${shown.run} · ${explorer.ask.text}`.slice(0, 90), theme, body);
}

function drawPositions(explorer: Explorer, theme: Theme): Figure | null {
  const { map, part, columns } = explorer;
  if (!map || !part) return null;
  const cross = part.part === "cross";
  const points = cross ? byKey(map) : byDistance(map, !part.causal || explorer.ask.changes.future);
  const most = Math.max(1e-9, ...points.map((bin) => bin.weight));
  const [left, wide, base] = [56, 760 / points.length, 250];
  let body = text(left - 8, base - 190, number(most), MUTE[theme], 'text-anchor="end"');
  points.forEach((bin, index) => {
    const high = (bin.weight / most) * 200;
    body += `<rect x="${(left + index * wide).toFixed(1)}" y="${(base - high).toFixed(1)}" width="${(wide * 0.84).toFixed(1)}" height="${high.toFixed(1)}" fill="${weightColour(0.8, theme)}"/>`;
    const label = cross ? cut(columns[bin.from] ?? "", 8) : binName(bin);
    if (bin.from !== bin.to || index % Math.ceil(points.length / 16) === 0) body += text(left + (index + 0.42) * wide, base + 18, label, MUTE[theme], 'text-anchor="middle"');
  });
  return frame(860, 290, title(explorer), theme, body);
}

function drawTree(explorer: Explorer, theme: Theme): Figure | null {
  if (!explorer.tree) return null;
  const drawn = place(explorer.tree);
  const curve = linkHorizontal<unknown, [number, number]>();
  let body = '<g transform="translate(16 44)">';
  for (const node of drawn.nodes) {
    const stroke = node.best ? weightColour(0.8, theme) : MUTE[theme];
    const opacity = node.kept || node.ended ? 0.8 : 0.25;
    body += `<path d="${curve({ source: [node.fromX, node.fromY], target: [node.x - 4, node.y] })}" fill="none" stroke="${stroke}" stroke-opacity="${opacity}" stroke-width="${(0.8 + 4 * node.probability).toFixed(2)}"/>`;
    body += text(node.x, node.y + 4, `${node.token} ${number(node.probability, 2)}`, node.best ? weightColour(0.8, theme) : node.kept || node.ended ? INK[theme] : MUTE[theme]);
  }
  return frame(drawn.width + 32, drawn.height + 60, explorer.ask.text.slice(0, 90), theme, `${body}</g>`);
}

