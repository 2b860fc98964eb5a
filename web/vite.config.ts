import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// Two pages: index.html of `regard explore`, playground.html of `regard serve`. Relative addresses: the explorer is under
// its token, /TOKEN/, which is another every time, and the playground perhaps under a path of a proxy.
export default defineConfig({
  base: "./",
  plugins: [svelte()],
  build: {
    outDir: "../src/regard/explore/page",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rolldownOptions: {
      input: ["index.html", "playground.html"],
      checks: { pluginTimings: false, bundlerTimings: false }, // a build takes seconds anyway
    },
  },
});
