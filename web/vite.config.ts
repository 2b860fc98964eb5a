import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// Relative addresses: the server puts the page under its token, /TOKEN/, and the token is another every time.
export default defineConfig({
  base: "./",
  plugins: [svelte()],
  build: {
    outDir: "../src/regard/explore/page",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rolldownOptions: { checks: { pluginTimings: false, bundlerTimings: false } }, // a build takes seconds anyway
  },
});
