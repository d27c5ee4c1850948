import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The page is served by the api under a policy without inline scripts or styles, so nothing is inlined.
export default defineConfig({
  plugins: [svelte()],
  build: { target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false }, reportCompressedSize: false },
  worker: { format: "es" },
  server: { proxy: { "/v1": "http://127.0.0.1:8000" } },
});
