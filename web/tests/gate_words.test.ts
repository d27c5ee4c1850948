import { describe, expect, it } from "vitest";

import type { GateWins } from "../src/api/types";
import { askedWords, preferenceWords, riseWords, shareText, winsWords } from "../src/pages/run/alerts/gate_words";

const WINS: GateWins = { wins: 70, ties: 8, losses: 50, rate: 0.578125, low: 0.49, high: 0.66, asked: null, swayed: null, unreadable: null };

describe("words of a judge gate", () => {
  it("give the rate in percent and the pairs", () => {
    expect(shareText(WINS.rate)).toBe("58 %");
    expect(shareText(null)).toBe("–");
    expect(winsWords(WINS)).toBe("70 won, 8 tied, 50 lost");
  });

  it("say how a judge that compares was asked, and nothing of one that scores", () => {
    expect(askedWords(WINS)).toBe("");
    expect(askedWords({ ...WINS, asked: 120, swayed: 0, unreadable: 0 })).toBe("120 pairs asked about in both orders");
    expect(askedWords({ ...WINS, asked: 120, swayed: 9, unreadable: 2 })).toBe(
      "120 pairs asked about in both orders; 9 decided by their place, so tied; 2 answers that could not be read, so tied",
    );
  });

  it("say of one answer whether it was preferred", () => {
    expect([1, 0, -1].map(preferenceWords)).toEqual(["preferred", "tied", "not preferred"]);
  });

  it("give the rise with twice its standard error, by which it counts", () => {
    expect(riseWords({ mean: 0.5, standard_error: 0.1 })).toBe("+0.500 ± 0.200");
    expect(riseWords({ mean: -0.25, standard_error: 0.1 })).toBe("−0.250 ± 0.200");
    expect(riseWords({ mean: null, standard_error: null })).toBe("–");
  });
});
