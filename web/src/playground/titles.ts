/* Names of tasks and settings, as shown to the user. */

import { say, type Word } from "../lib/words.svelte";
import type { Task } from "./tasks";

export function taskTitle(task: Task): string {
  return say(`task${task[0].toUpperCase()}${task.slice(1)}` as Word);
}

/** The title of a field of a request: max_tokens has the word setMaxTokens. */
export function settingTitle(name: string): string {
  const words = name.split("_").map((word) => word[0].toUpperCase() + word.slice(1));
  return say(`set${words.join("")}` as Word);
}
