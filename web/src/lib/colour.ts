/* One hue, and lightness carries the number: the scale of the package's own figures, light and dark.
   Differences have two hues, blue for more and amber for less, and nothing in the middle. */

const WEIGHTS = {
  light: ["#f1f5fa", "#b5cff5", "#7da9ea", "#4c83d4", "#215db3", "#003b89"],
  dark: ["#1f2630", "#2a466e", "#3b68ab", "#598edd", "#85b7ff", "#bee0ff"],
};
const CHANGES = {
  light: ["#8a3d00", "#c96a1b", "#eeb27c", "#f4f4f3", "#93b7ee", "#3f77cc", "#0a428f"],
  dark: ["#ffd3a1", "#e0924a", "#8a5527", "#20252e", "#2f5896", "#5f97e6", "#bee0ff"],
};

export type Theme = "light" | "dark";

function linear(anchors: string[]): (fraction: number) => string {
  const stops = anchors.map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
  return (fraction) => {
    const place = Math.min(Math.max(fraction, 0), 1) * (stops.length - 1);
    const at = Math.min(Math.floor(place), stops.length - 2);
    const mix = stops[at].map((low, i) => Math.round(low + (stops[at + 1][i] - low) * (place - at)));
    return `rgb(${mix.join(",")})`;
  };
}

const scales = {
  weights: { light: linear(WEIGHTS.light), dark: linear(WEIGHTS.dark) },
  changes: { light: linear(CHANGES.light), dark: linear(CHANGES.dark) },
};

/** The colour of a weight, 0 to 1. */
export function weightColour(fraction: number, theme: Theme): string {
  return scales.weights[theme](fraction);
}

/** The colour of a change, -1 to 1. */
export function changeColour(fraction: number, theme: Theme): string {
  return scales.changes[theme](Math.min(Math.max(fraction, -1), 1) / 2 + 0.5);
}

/** Black or white, whichever has more contrast on a colour `rgb(…)` (WCAG 2). */
export function inkOn(colour: string): string {
  const [red, green, blue] = colour.match(/\d+/g)!.map((value) => {
    const part = Number(value) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

/** 256 colours as pixels, ABGR in one 32-bit word, as canvases on every common machine hold them. */
export type Palette = Uint32Array;
const palettes = new Map<string, Palette>();

export function palette(kind: "weights" | "changes", theme: Theme): Palette {
  const key = `${kind} ${theme}`;
  let made = palettes.get(key);
  if (!made) {
    made = Uint32Array.from({ length: 256 }, (_, i) => {
      const [red, green, blue] = scales[kind][theme](i / 255).match(/\d+/g)!.map(Number);
      return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    });
    palettes.set(key, made);
  }
  return made;
}
