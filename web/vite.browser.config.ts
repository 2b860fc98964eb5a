import { fileURLToPath } from "node:url";

import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The page of `regard export --web`: its addresses are relative, since a static server may put it anywhere.
export default defineConfig({
  root: fileURLToPath(new URL("browser", import.meta.url)),
  base: "./",
  plugins: [svelte({ configFile: "../svelte.config.js" })],
  worker: { format: "es" },
  build: {
    outDir: "../../src/regard/interop/page",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rolldownOptions: { checks: { pluginTimings: false, bundlerTimings: false } },
  },
});
