/* Light or dark: the system setting, or the choice of the user. */

import type { Theme } from "./colour";

export type Choice = "auto" | Theme;

const system = window.matchMedia("(prefers-color-scheme: dark)");
let dark = $state(system.matches);
let choice = $state<Choice>("auto");
system.addEventListener("change", (event) => (dark = event.matches));

function apply(next: Choice): void {
  choice = next;
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
}

const kept = localStorage.getItem("regard.theme");
if (kept === "light" || kept === "dark") apply(kept);

export function themeChoice(): Choice {
  return choice;
}

export function currentTheme(): Theme {
  return choice === "auto" ? (dark ? "dark" : "light") : choice;
}

export function nextTheme(): void {
  const next = { auto: "light", light: "dark", dark: "auto" } as const;
  apply(next[choice]);
  localStorage.setItem("regard.theme", choice);
}
