/** Which metrics are drawn together. Titles, units, bands and meanings come from the registry. */

export interface Panel {
  id: string;
  title: string;
  left: string[];
  /** Metrics of another size, on an axis of their own. */
  right?: string[];
  scale?: "linear" | "log";
}

export const PANELS: Panel[] = [
  {
    id: "reward",
    title: "Reward",
    left: ["reward/score_mean", "reward/penalized_mean", "heldout/score_mean"],
    right: ["judge/score_mean"],
  },
  { id: "kl", title: "KL to the reference", left: ["kl/ref_sequence"], right: ["kl/ref_token", "kl/coef"] },
  { id: "policy", title: "Policy update", left: ["policy/approx_kl"], right: ["policy/clip_fraction"] },
  {
    id: "ratio",
    title: "Ratio",
    left: ["policy/first_minibatch_ratio_max_dev"],
    right: ["policy/ratio_max"],
    scale: "log",
  },
  {
    id: "value",
    title: "Value",
    left: ["value/explained_variance", "value/explained_variance_return"],
    right: ["value/clip_fraction"],
  },
  { id: "losses", title: "Losses", left: ["policy/loss"], right: ["value/loss"] },
  {
    id: "generation",
    title: "Generation",
    left: ["response/length_mean", "response/length_p95"],
    right: ["response/eos_rate"],
  },
  {
    id: "diversity",
    title: "Diversity",
    left: ["response/distinct_2"],
    right: ["response/repeat_3", "response/identical"],
  },
  { id: "entropy", title: "Entropy", left: ["policy/entropy"] },
  { id: "gradients", title: "Gradient norms", left: ["policy/grad_norm", "value/grad_norm"] },
  {
    id: "time",
    title: "Time in an iteration",
    left: ["time/rollout_s", "time/score_s", "time/logprobs_s", "time/update_s"],
  },
  {
    id: "speed",
    title: "Speed and memory",
    left: ["throughput/response_tokens_per_s", "throughput/trained_tokens_per_s"],
    right: ["memory/peak_gib"],
  },
];

export function metricsOf(panel: Panel): string[] {
  return [...panel.left, ...(panel.right ?? [])];
}

/** All that the charts need, and the seconds an iteration takes, for the time that is left. */
export const CHARTED = new Set([...PANELS.flatMap(metricsOf), "time/iteration_s"]);
