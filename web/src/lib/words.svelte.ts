/* The words of the page, English and Korean. A test compares the two lists: neither may lack a sentence. */

import { english } from "./words.en";
import { korean } from "./words.ko";

export type Word = keyof typeof english;
export const LANGUAGES = { en: english, ko: korean };
export type Language = keyof typeof LANGUAGES;

/** By the address (`regard --lang ko explore`), by an earlier choice on this page, or by the browser. */
function first(): Language {
  for (const one of [new URLSearchParams(location.search).get("lang"), localStorage.getItem("regard.language")])
    if (one === "en" || one === "ko") return one;
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
  const url = new URL(location.href);
  if (url.searchParams.has("lang")) {
    url.searchParams.delete("lang"); // the choice on the page counts from now on
    history.replaceState(history.state, "", url);
  }
}

/** A sentence in the reader's language, with {0}, {1}, … filled in. */
export function say(word: Word, ...values: (string | number)[]): string {
  return LANGUAGES[language][word].replace(/\{(\d)\}/g, (_, index) => String(values[Number(index)] ?? ""));
}
