/* The second side: what Compare and Patching ask for beside the input of the page. */

import type { Explorer } from "./explorer.svelte";
import type { Question } from "./look";

const MONTH = /\b(January|February|March|April|May|June|July|August|September|October|November|December)\b/;

/** The input of Compare; what is not chosen is as on the first side. */
export function secondSide({ ask, runs, shown }: Explorer): Question {
  const { other } = ask;
  const run = other.run || ask.run;
  const images = runs.find((one) => one.name === run)?.input === "patches" || (run === ask.run && shown?.size != null);
  return { run, step: other.step, text: other.text || ask.text, target: null, image: images ? (other.image ?? ask.image) : null, changes: {} };
}

/** A text that differs in one word: another month, where there is one. */
export function otherMonth(text: string): string {
  const [month] = text.match(MONTH) ?? [];
  return month ? text.replace(MONTH, month === "March" ? "July" : "March") : "";
}

/** A test image with another target. */
function otherImage({ ask, info }: Explorer): string | null {
  const examples = info?.examples ?? [];
  const target = examples.find((one) => one.image === ask.image)?.target;
  return examples.find((one) => one.image && one.image !== ask.image && one.target !== target)?.image ?? null;
}

/** The request of Patching; null without a second input. */
export function patchingQuestion(explorer: Explorer): (Question & { other: string; other_image: string | null }) | null {
  const { ask, shown } = explorer;
  if (!shown) return null;
  const images = shown.size != null;
  const other = images ? "" : ask.other.text || otherMonth(ask.text);
  const image = images ? (ask.other.image ?? otherImage(explorer)) : null;
  return other || image ? { ...shown.question, target: null, other, other_image: image } : null;
}
