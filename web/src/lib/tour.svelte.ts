/* The tour: which steps apply to the open model, what each does to the page, and the answer to its question.

   A step changes the same state as the controls of the page, so that everything can be continued by hand. No answer is
   written down: each is computed from the open model when it is asked for. */

import { noChanges, type HeadName } from "./ask";
import type { Explorer } from "./explorer.svelte";
import { headMap, ONE, spaceOf, type Look, type Part } from "./look";
import { headFacts } from "./heads.svelte";
import { spread } from "./measure";
import * as server from "./server";
import { inPart, lossNumber, partTitle } from "./titles";
import type { englishTour } from "./tour.en";
import { say } from "./words.svelte";

export type TourWords = typeof englishTour;
export type StepName = (typeof STEPS)[number]["name"];

export interface Question {
  ask: string;
  options: string[];
  answer: () => Promise<string>; // one of the options, or a sentence that starts with one
}

interface Step {
  name: "input" | "whole" | "lines" | "steps" | "mask" | "positions" | "off" | "broken" | "temperature" | "roles" | "search" | "training";
  mark: string; // the element of the page it is about
  applies: (explorer: Explorer) => boolean;
  act: (explorer: Explorer) => void | Promise<void>;
  question: (explorer: Explorer, words: TourWords) => Question | null;
}

export const DATE = "July 4th, 1976";
const NO_DATE = "February 30th, 2021";

export function fill(text: string, ...values: (string | number)[]): string {
  return text.replace(/\{(\d)\}/g, (_, index) => String(values[Number(index)] ?? ""));
}

export function isDemo(explorer: Explorer): boolean {
  return explorer.info?.generator === "korean-dates";
}

/** The page without changes, with the text of the tour if the model is the demo's: every step begins with it. */
export function clear(explorer: Explorer): void {
  explorer.ask.changes = noChanges();
  if (explorer.ask.step !== null) explorer.atStep(null);
  explorer.ask.show = "after";
  if (isDemo(explorer) && explorer.ask.text !== DATE) explorer.type(DATE);
  explorer.refresh();
}

/** A view of the unchanged page, once its response is there. */
async function view(explorer: Explorer, name: Explorer["ask"]["view"], grid: Explorer["ask"]["grid"] = "maps"): Promise<void> {
  clear(explorer);
  explorer.ask.view = name;
  explorer.ask.grid = grid;
  while (explorer.busy) await new Promise((done) => setTimeout(done, 50));
}

function changed(explorer: Explorer, changes: object): Promise<Look> {
  return server.look({ ...server.question(explorer.ask, false), step: null, changes });
}

function plain(explorer: Explorer): Promise<Look> {
  return changed(explorer, {});
}

/** The query that the tour looks at: the month of a date, else the last token. */
function queryOf(explorer: Explorer, part: Part): number {
  const labels = explorer.shown?.labels[part.rows] ?? [];
  const month = labels.lastIndexOf("월");
  return part.part === "cross" && month > 0 ? month - 1 : labels.length - 1;
}

/** The head that the tour looks at: the first one of the wanted part. */
function firstHead(explorer: Explorer, wanted: Part["part"] = "cross"): { part: Part; title: string } | null {
  const parts = explorer.shown?.parts ?? [];
  const part = parts.find((one) => one.part === wanted) ?? parts[0];
  return part ? { part, title: inPart(part.part, parts, say("headName", part.layer, 0)) } : null;
}

function pickHead(explorer: Explorer, wanted?: Part["part"]): void {
  const part = firstHead(explorer, wanted)?.part;
  if (!part) return;
  explorer.select(part.part, part.layer, 0);
  explorer.choose(spaceOf(part.rows), queryOf(explorer, part));
}

/** That head with its query and the weights of the query; null while its map is loading (of a long input). */
function firstRow(explorer: Explorer) {
  const first = firstHead(explorer);
  const map = first && explorer.mapOf(first.part, 0);
  if (!map) return null;
  const query = queryOf(explorer, first.part);
  return { ...first, query, row: map.values.subarray(query * map.columns, (query + 1) * map.columns) };
}

/** The position whose prediction the tour is about: the month of a date, else the mean of all. */
function important(labels: string[]): number | null {
  const month = labels.lastIndexOf("월");
  return month > 0 ? month - 1 : null;
}

async function viewOff(explorer: Explorer): Promise<void> {
  await view(explorer, "model", "off");
  headFacts.at = important(explorer.shown?.labels.written ?? []);
}

async function neededHead(explorer: Explorer): Promise<HeadName> {
  await headFacts.measureOff(explorer);
  while (headFacts.busy) await new Promise((done) => setTimeout(done, 100));
  const all = (explorer.shown?.parts ?? []).flatMap((part) =>
    Array.from({ length: part.heads }, (_, head) => ({
      head: [part.part, part.layer, head] as HeadName,
      change: headFacts.change(part.part, part.layer, head, important(headFacts.labels))?.change ?? -Infinity,
    })),
  );
  return all.reduce((best, one) => (one.change > best.change ? one : best)).head;
}

function headName(explorer: Explorer, head: HeadName): string {
  return `${partTitle(head[0], explorer.shown?.parts ?? [])}, ${say("headName", head[1], head[2])}`;
}

function lossWay(before: number, after: number, words: TourWords): string {
  const way = Math.abs(after - before) < 5e-4 ? words.same : after > before ? words.up : words.down;
  return `${way} (${lossNumber(before)} → ${lossNumber(after)})`;
}

/** What a model predicts, as one text: the generated output, or the most probable token of every position. */
function prediction(look: Look, side: "before" | "after"): string {
  const { output } = look;
  return output[side].generated ?? output.positions.map((place) => [...place.choices].sort((one, other) => other[side] - one[side])[0]?.label).join(" ");
}

export const STEPS: Step[] = [
  {
    name: "input",
    mark: ".given",
    applies: isDemo,
    act: async (explorer) => {
      await view(explorer, "model");
      explorer.type(NO_DATE);
    },
    question: (explorer, words) => ({
      ask: fill(words.input.ask, NO_DATE),
      options: ["2021년 2월 30일", words.input.noDate, words.input.other],
      answer: async () => {
        const look = await server.look({ ...server.question(explorer.ask, false), step: null, text: NO_DATE, target: null });
        const { generated } = look.output.before;
        if (!generated) return words.input.noDate;
        return generated === "2021년 2월 30일" ? generated : `${words.input.other} (${generated})`;
      },
    }),
  },
  {
    name: "whole",
    mark: "#view",
    applies: () => true,
    act: (explorer) => view(explorer, "model"),
    question: (explorer, words) => {
      const parts = explorer.shown?.parts ?? [];
      const count = parts.reduce((sum, part) => sum + part.heads, 0);
      const others = [parts[0]?.heads ?? 1, parts.length, 2 * count].filter((one) => one !== count);
      const options = [...new Set([count, ...others])].sort((one, other) => one - other).map(String);
      return { ask: words.whole.ask, options, answer: async () => String(count) };
    },
  },
  {
    name: "lines",
    mark: "#view",
    applies: () => true,
    act: async (explorer) => {
      await view(explorer, "lines");
      pickHead(explorer);
    },
    question: (explorer, words) => {
      const first = firstRow(explorer);
      if (!first) return null;
      const { part, title, query, row } = first;
      const labels = explorer.shown!.labels;
      const best = row.indexOf(Math.max(...row));
      const label = (at: number) => `${labels[part.columns]?.[at]} (${at + 1})`;
      const few = Array.from(row, (_, at) => at).sort((one, other) => row[other] - row[one]).slice(0, 4);
      return {
        ask: `${fill(words.lines.ask, labels[part.rows]?.[query] ?? "")} (${title})`,
        options: few.sort((one, other) => one - other).map(label),
        answer: async () => label(best),
      };
    },
  },
  {
    name: "steps",
    mark: "#view",
    applies: () => true,
    act: async (explorer) => {
      await view(explorer, "steps");
      pickHead(explorer);
    },
    question: (explorer, words) => {
      const first = firstRow(explorer);
      if (!first) return null;
      const sum = first.row.reduce((total, value) => total + value, 0) / ONE;
      const answer = Math.abs(sum - 1) < 0.01 ? "1" : words.steps.depends;
      return { ask: words.steps.ask, options: ["1", words.steps.keys, words.steps.depends], answer: async () => answer };
    },
  },
  {
    name: "mask",
    mark: "#view",
    applies: (explorer) => explorer.shown?.parts.some((part) => part.causal) ?? false,
    act: async (explorer) => {
      await view(explorer, "map");
      pickHead(explorer, "decoder");
    },
    question: (explorer, words) => {
      const first = firstHead(explorer, "decoder");
      const map = first && explorer.mapOf(first.part, 0);
      if (!map) return null;
      let later = 0;
      for (let row = 0; row < map.rows; row++) for (let at = row + 1; at < map.columns; at++) later += map.values[row * map.columns + at];
      const fraction = later / map.rows / ONE;
      const answer = fraction === 0 ? "0" : `${fraction < 0.5 ? words.mask.some : words.mask.most} (${fraction.toFixed(2)})`;
      return { ask: `${words.mask.ask} (${first.title})`, options: ["0", words.mask.some, words.mask.most], answer: async () => answer };
    },
  },
  {
    name: "positions",
    mark: "#touch",
    applies: (explorer) => explorer.before?.shuffles ?? false,
    act: async (explorer) => {
      await view(explorer, "model");
      explorer.ask.changes.shuffle = 1;
      explorer.refresh();
    },
    question: (explorer, words) => ({
      ask: words.positions.ask,
      options: [words.yes, words.no],
      answer: async () => {
        const look = await changed(explorer, { shuffle: 1 });
        const same = prediction(look, "before") === prediction(look, "after");
        return same ? words.yes : look.output.after.generated === null ? words.no : `${words.no} (${look.output.after.generated})`;
      },
    }),
  },
  {
    name: "off",
    mark: "#view",
    applies: () => true,
    act: viewOff,
    question: (explorer, words) => {
      const parts = explorer.shown?.parts ?? [];
      const labels = explorer.shown?.labels.written ?? [];
      const at = important(labels);
      const ask = at === null ? words.off.askAny : fill(words.off.ask, labels[at]);
      const all = parts.flatMap((part) => Array.from({ length: part.heads }, (_, head): HeadName => [part.part, part.layer, head]));
      const options = (all.length <= 24 ? all : []).map((head) => headName(explorer, head));
      return { ask, options, answer: async () => headName(explorer, await neededHead(explorer)) };
    },
  },
  {
    name: "broken",
    mark: "[data-testid=output]",
    applies: () => true,
    act: async (explorer) => {
      await viewOff(explorer);
      const head = await neededHead(explorer);
      explorer.ask.changes.heads = [head];
      explorer.refresh();
    },
    question: (explorer, words) => {
      const writes = explorer.shown?.output.kind === "target";
      const look = async () => changed(explorer, { heads: [explorer.ask.changes.heads[0] ?? (await neededHead(explorer))] });
      if (writes)
        return {
          ask: words.broken.ask,
          options: [words.yes, words.no],
          answer: async () => {
            const { before, after } = (await look()).output;
            return before.generated === after.generated ? words.no : `${words.yes} (${before.generated} → ${after.generated || "∅"})`;
          },
        };
      if (explorer.before?.output.before.loss == null) return null;
      return {
        ask: words.broken.askLoss,
        options: [words.up, words.down, words.same],
        answer: async () => {
          const { before, after } = (await look()).output;
          return lossWay(before.loss ?? 0, after.loss ?? 0, words);
        },
      };
    },
  },
  {
    name: "temperature",
    mark: "#touch",
    applies: (explorer) => explorer.before?.output.before.loss != null,
    act: async (explorer) => {
      await view(explorer, "model");
      explorer.ask.changes.temperature = 3;
      explorer.refresh();
    },
    question: (explorer, words) => ({
      ask: words.temperature.ask,
      options: [words.up, words.down, words.same],
      answer: async () => {
        const { before, after } = (await changed(explorer, { temperature: 3 })).output;
        return lossWay(before.loss ?? 0, after.loss ?? 0, words);
      },
    }),
  },
  {
    name: "roles",
    mark: "#view",
    applies: (explorer) => explorer.info?.input !== "patches",
    act: (explorer) => view(explorer, "model", "roles"),
    question: (explorer, words) => ({
      ask: words.roles.ask,
      options: [words.yes, words.no],
      answer: async () => {
        await headFacts.measureRoles(explorer);
        while (headFacts.busy) await new Promise((done) => setTimeout(done, 100));
        const heads = headFacts.roles?.heads ?? [];
        if (!heads.length) throw new Error(headFacts.refused ?? "");
        const clear = heads.filter((one) => !["mixed", "broad"].includes(one.pattern));
        const weigh = (one: server.Role) => one.loss_change ?? one.gradient ?? 0;
        const top = heads.reduce((best, one) => (weigh(one) > weigh(best) ? one : best));
        if (!clear.length) return `${words.no} (${headName(explorer, [top.part, top.layer, top.head])})`;
        const sharp = clear.reduce((best, one) => (one.score > best.score ? one : best));
        const names = [sharp, top].map((one) => headName(explorer, [one.part, one.layer, one.head]));
        return sharp === top ? `${words.yes} (${names[0]})` : `${words.no} (${names.join(" / ")})`;
      },
    }),
  },
  {
    name: "search",
    mark: "#view",
    applies: (explorer) => explorer.shown?.output.kind === "target",
    act: (explorer) => view(explorer, "search"),
    question: (explorer, words) => ({
      ask: words.search.ask,
      options: [words.search.sure, words.search.half, words.search.unsure],
      answer: async () => {
        const choices = (await plain(explorer)).output.positions[0].choices;
        const best = Math.max(...choices.map((choice) => choice.after));
        return `${best > 0.9 ? words.search.sure : best >= 0.5 ? words.search.half : words.search.unsure} (${best.toFixed(3)})`;
      },
    }),
  },
  {
    name: "training",
    mark: "#view",
    applies: (explorer) => (explorer.info?.snapshots?.length ?? 0) > 1,
    act: async (explorer) => {
      await view(explorer, "training");
      pickHead(explorer);
      explorer.atStep(explorer.info?.snapshots[0] ?? null);
    },
    question: (explorer, words) => {
      const first = firstHead(explorer);
      if (!first) return null;
      const [{ ask }, { part }] = [explorer, first];
      return {
        ask: `${words.training.ask} (${first.title})`,
        options: [words.training.more, words.training.fewer, words.same],
        answer: async () => {
          // the same target for both: what the trained model generates
          const target = ask.target ?? (await plain(explorer)).output.before.generated;
          const question = { ...server.question(ask, false), target };
          const looks = await Promise.all([explorer.info?.snapshots[0] ?? 0, null].map((step) => server.look({ ...question, step })));
          const [old, new_] = looks.map((look) => headMap(look, part, 0));
          if (!old || !new_) throw new Error(say("thinned"));
          const [a, b] = [spread(old), spread(new_)];
          const way = Math.abs(a - b) < 0.05 ? words.same : a > b ? words.training.more : words.training.fewer;
          return `${way} (${a.toFixed(1)} → ${b.toFixed(1)})`;
        },
      };
    },
  },
];

/** The steps that apply to the open model. */
export function stepsFor(explorer: Explorer): Step[] {
  return STEPS.filter((step) => step.applies(explorer));
}
