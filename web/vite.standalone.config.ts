import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The page of `regard explore` as one script and one style sheet, which a saved page (lib/standalone.ts) holds inside.
export default defineConfig({
  plugins: [svelte()],
  publicDir: false,
  build: {
    outDir: "../src/regard/explore/page/standalone",
    emptyOutDir: true,
    target: "es2022",
    cssCodeSplit: false,
    rolldownOptions: {
      input: "src/main.ts",
      output: { entryFileNames: "page.js", assetFileNames: "page[extname]", codeSplitting: false },
      checks: { pluginTimings: false, bundlerTimings: false },
    },
  },
});
