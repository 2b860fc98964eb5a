/* The words of the page, English and Korean. A test compares the two lists: neither may lack a sentence. */

import { english } from "./words.en";
import { korean } from "./words.ko";

export type Word = keyof typeof english;
export const LANGUAGES = { en: english, ko: korean };
export type Language = keyof typeof LANGUAGES;

function first(): Language {
  const kept = localStorage.getItem("regard.language");
  if (kept === "en" || kept === "ko") return kept;
  return navigator.language.startsWith("ko") ? "ko" : "en";
}

let language = $state<Language>(first());

export function currentLanguage(): Language {
  return language;
}

export function setLanguage(next: Language): void {
  language = next;
  localStorage.setItem("regard.language", next);
  document.documentElement.lang = next;
}

/** A sentence in the reader's language, with {0}, {1}, … filled in. */
export function say(word: Word, ...values: (string | number)[]): string {
  return LANGUAGES[language][word].replace(/\{(\d)\}/g, (_, index) => String(values[Number(index)] ?? ""));
}
