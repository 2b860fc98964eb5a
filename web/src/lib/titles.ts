/* Names for parts of a model, as shown to the user. */

import type { Part, PartName } from "./look";
import type { Ask } from "./ask";
import type { Explorer } from "./explorer.svelte";
import type { Stages } from "./stages";
import { say, type Word } from "./words.svelte";

/** A model with one stack has only self-attention. */
export function partTitle(name: PartName, parts: Part[]): string {
  return parts.every((part) => part.part === name) && name !== "cross" ? say("self") : say(name);
}

export function partSentence(name: PartName, parts: Part[]): string {
  if (name === "decoder" && parts.every((part) => part.part === name)) return say("selfLong");
  return say(({ encoder: "encoderLong", decoder: "decoderLong", cross: "crossLong" } as const)[name]);
}

/** The chosen head, or the mean of its layer; with its kind of attention where there are several. */
export function headTitle(explorer: Explorer): string {
  const { part, head, shown } = explorer;
  if (!part || !shown) return "";
  const name = head === null ? say("meanName", part.layer, part.heads) : say("headName", part.layer, head);
  return inPart(part.part, shown.parts, name);
}

/** A name within a kind of attention, where a model has several: "Cross: Layer 0, head 1". */
export function inPart(name: PartName, parts: Part[], what: string): string {
  return parts.every((part) => part.part === name) ? what : `${partTitle(name, parts)}: ${what}`;
}

/** The name of a position encoding. */
export function positionTitle(kind: string): string {
  const names: Record<string, string> = { rope: "RoPE", alibi: "ALiBi", t5: "T5", relative: "Shaw" };
  return names[kind] ?? say(kind === "learned" ? "positionLearned" : "positionSinusoidal");
}

/** Room for a label in a table, in rem. */
export function labelRoom(label: string): number {
  return [...label].reduce((sum, letter) => sum + (letter.codePointAt(0)! > 0x2e80 ? 0.86 : 0.5), 0.5);
}

/** The columns of a step: products, scores, scaled, masked. 1/√d_k has its name, unless the model has another scale. */
export function stageTitles({ dotted, biased, scale, q }: Stages, { changes, show }: Ask): string[] {
  const factor = `${Math.abs(scale - q.length ** -0.5) < 1e-6 ? "1/√d_k = " : ""}${number(scale)}`;
  const cooled = changes.temperature === 1 || show === "before" ? "" : ` ÷ ${changes.temperature}`;
  return [
    dotted ? say("stepProduct") : "q",
    say(dotted ? "stepScores" : "score"),
    say(biased ? "stepBias" : "stepScaled", factor),
    say("stepMasked") + cooled,
  ];
}

/** A loss: small ones keep two digits. */
export function lossNumber(value: number): string {
  if (value > 0 && value < 1e-6) return "<0.000001";
  return value < 0.01 ? value.toPrecision(2) : value.toFixed(3);
}

/** The numbers of one step, of one or several channels. */
export function stepNumbers(step: number[]): string {
  return step.map((value) => Number(value.toPrecision(4)).toString().replace("-", "−")).join(" ");
}

export function number(value: number, digits = 3): string {
  if (value === -Infinity) return "−∞";
  if (value > 0 && value < 0.5 * 10 ** -digits) return `<${(10 ** -digits).toFixed(digits)}`;
  if (value < 0 && value > -0.5 * 10 ** -digits) return "0";
  return value.toFixed(digits).replace("-", "−");
}

const PATTERNS: Record<string, Word> = {
  "previous token": "patternPrevious",
  "next token": "patternNext",
  self: "patternSelf",
  "first token": "patternFirst",
  "last token": "patternLast",
  punctuation: "patternPunctuation",
  alignment: "patternAlignment",
  broad: "patternBroad",
  mixed: "patternMixed",
};

/** What a head attends to, as `regard heads` names it. */
export function patternTitle(pattern: string): string {
  return pattern in PATTERNS ? say(PATTERNS[pattern]) : say("patternOffset", pattern.replace(" tokens", "").replace("-", "−"));
}
