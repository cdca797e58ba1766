// Figures of experts from the counters of /live.

import assert from "node:assert/strict";
import { test } from "node:test";
import { figures } from "../../src/page/experts.js";

test("experts of a step and the busiest one", () => {
  const layer = { layer: 3, experts: 32, steps: 50, chosen: 400, tokens: 640, busiest: 60, idle: 2 };
  assert.deepEqual(figures(layer), { chosen: 8, share: 0.25, busiest: 3 });
});

test("no step yet", () => {
  const layer = { layer: 0, experts: 32, steps: 0, chosen: 0, tokens: 0, busiest: 0, idle: 32 };
  assert.deepEqual(figures(layer), { chosen: 0, share: 0, busiest: 0 });
});
