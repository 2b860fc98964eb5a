/* Names for parts of a model, as shown to the user. */

import type { Part, PartName } from "./look";
import type { Explorer } from "./explorer.svelte";
import { say } from "./words.svelte";

/** A model with one stack has only self-attention. */
export function partTitle(name: PartName, parts: Part[]): string {
  return parts.every((part) => part.part === name) && name !== "cross" ? say("self") : say(name);
}

export function partSentence(name: PartName, parts: Part[]): string {
  if (name === "decoder" && parts.every((part) => part.part === name)) return say("selfLong");
  return say(({ encoder: "encoderLong", decoder: "decoderLong", cross: "crossLong" } as const)[name]);
}

/** The chosen head, or the mean of its layer. */
export function headTitle(explorer: Explorer): string {
  const { part, head } = explorer;
  if (!part) return "";
  return head === null ? say("meanName", part.layer, part.heads) : say("headName", part.layer, head);
}

/** A loss: small ones keep two digits. */
export function lossNumber(value: number): string {
  return value < 0.01 ? value.toPrecision(2) : value.toFixed(3);
}

export function number(value: number, digits = 3): string {
  if (value === -Infinity) return "−∞";
  if (value > 0 && value < 0.5 * 10 ** -digits) return `<${(10 ** -digits).toFixed(digits)}`;
  return value.toFixed(digits).replace("-", "−");
}
