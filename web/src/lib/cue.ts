/* Scroll cues: the edge beyond which a box has more content fades out. */

/** An action: --cue-top, --cue-right, --cue-bottom and --cue-left of the box are 0 at an end, else 1. "ends": only the
    bottom and the right, in a box with labels that stay at the top and the left. */
export function cue(box: HTMLElement, which: "all" | "ends" = "all"): { destroy(): void } {
  box.classList.add("cue");
  const update = () => {
    const { scrollTop: top, scrollLeft: left, scrollHeight, scrollWidth, clientHeight, clientWidth } = box;
    const edges = { top, left, bottom: scrollHeight - clientHeight - top, right: scrollWidth - clientWidth - left };
    const names = which === "ends" ? (["bottom", "right"] as const) : (["top", "left", "bottom", "right"] as const);
    for (const name of names) box.style.setProperty(`--cue-${name}`, edges[name] > 2 ? "1" : "0");
  };
  const sizes = new ResizeObserver(update);
  sizes.observe(box);
  for (const child of box.children) sizes.observe(child);
  const content = new MutationObserver(update);
  content.observe(box, { childList: true, subtree: true });
  box.addEventListener("scroll", update, { passive: true });
  update();
  return {
    destroy() {
      sizes.disconnect();
      content.disconnect();
      box.removeEventListener("scroll", update);
    },
  };
}
