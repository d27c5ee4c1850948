/**
 * Which metrics are drawn together, and where on the page: every metric of the registry has one place. Titles, units,
 * bands and meanings come from the registry. A name that ends in `*` stands for its family's members.
 */

export interface Panel {
  id: string;
  title: string;
  left: string[];
  /** Metrics of another size, on an axis of their own. */
  right?: string[];
  scale?: "linear" | "log";
  /** Only some runs record it: not shown in the others. */
  ifUsed?: boolean;
}

export interface Fold {
  id: string;
  title: string;
  panels: Panel[];
}

/** What a reader looks at first, always on the page. */
export const PANELS: Panel[] = [
  {
    id: "reward",
    title: "Reward",
    left: ["reward/score_mean", "reward/penalized_mean", "heldout/score_mean"],
    right: ["judge/score_mean"],
  },
  {
    id: "gate",
    title: "Judge gate",
    left: ["judge/win_rate", "judge/win_rate_low", "judge/win_rate_high"],
    ifUsed: true,
  },
  {
    id: "gate-start",
    title: "Judge gate against the start",
    left: ["judge/win_rate_vs_start", "judge/win_rate_vs_start_low", "judge/win_rate_vs_start_high"],
    ifUsed: true,
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
    left: ["response/length_mean", "response/length_p50", "response/length_p95"],
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

/** The rest, folded until it is asked for. */
export const FOLDS: Fold[] = [
  {
    id: "more-reward",
    title: "Reward",
    panels: [
      { id: "trained", title: "Score as trained on", left: ["reward/trained_mean", "reward/total_mean"] },
      {
        id: "score-spread",
        title: "Deviation of the score",
        left: ["reward/score_std", "reward/penalized_std", "reward/trained_std", "heldout/score_std"],
      },
      { id: "sources", title: "Sources", left: ["reward/source_mean/*"], ifUsed: true },
      {
        id: "length-correction",
        title: "Score and length",
        left: ["reward/corrected_mean", "reward/corrected_std"],
        right: ["reward/length_slope"],
      },
      {
        id: "normalisation",
        title: "Normalisation",
        left: ["reward/normalized_mean", "reward/normalized_std"],
        right: ["reward/running_mean", "reward/running_std"],
      },
    ],
  },
  {
    id: "more-kl",
    title: "KL",
    panels: [
      { id: "kl-k3", title: "KL by the estimator k3", left: ["kl/ref_sequence_k3"], right: ["kl/ref_token_k3"] },
      { id: "kl-target", title: "KL and its target", left: ["kl/target_error"] },
    ],
  },
  {
    id: "more-policy",
    title: "Policy update",
    panels: [
      { id: "kl-epochs", title: "Approximate KL by epoch", left: ["policy/approx_kl/epoch_*"], ifUsed: true },
      { id: "clip-epochs", title: "Clip fraction by epoch", left: ["policy/clip_fraction/epoch_*"], ifUsed: true },
      { id: "clipping", title: "Clipping", left: ["policy/clip_fraction_active"], right: ["policy/log_ratio_clamped"] },
      {
        id: "first-minibatch",
        title: "Before the first step",
        left: ["policy/first_minibatch_ratio", "policy/ratio_mean"],
        right: ["policy/first_minibatch_clip_fraction"],
      },
      {
        id: "steps",
        title: "Optimizer steps",
        left: ["optimizer/steps"],
        right: ["optimizer/skipped", "optimizer/empty_minibatches"],
      },
      {
        id: "learning-rates",
        title: "Learning rates",
        left: ["optimizer/learning_rate"],
        right: ["optimizer/value_learning_rate"],
      },
    ],
  },
  {
    id: "more-value",
    title: "Value",
    panels: [
      { id: "values", title: "Values and returns", left: ["value/mean", "value/return_mean"] },
      { id: "advantages", title: "Advantages before whitening", left: ["advantage/mean", "advantage/std"] },
    ],
  },
  {
    id: "more-generation",
    title: "Generation",
    panels: [
      {
        id: "engine-gap",
        title: "Engine gap",
        left: ["rollout/engine_gap_mean", "rollout/engine_gap_k3"],
        right: ["rollout/engine_gap_max"],
      },
      { id: "unusable", title: "Unusable answers", left: ["response/empty", "response/invalid", "reward/invalid/*"] },
      { id: "engine", title: "Engine", left: ["rollout/rows_at_once"], right: ["rollout/policy_version"] },
      {
        id: "heldout",
        title: "Held-out answers",
        left: ["heldout/length_mean"],
        right: ["heldout/eos_rate", "heldout/distinct_2"],
        ifUsed: true,
      },
    ],
  },
  {
    id: "more-system",
    title: "System",
    panels: [
      { id: "limit", title: "Share of the hardware's limit", left: ["limit/fraction"] },
      {
        id: "whole-time",
        title: "Time of an iteration",
        left: ["time/iteration_s"],
        right: ["time/sync_s", "time/evaluation_s"],
      },
      {
        id: "data",
        title: "Data",
        left: ["data/prompts_trained", "data/prompts_filtered", "data/prompts_failed"],
        right: ["data/response_tokens"],
      },
    ],
  },
];

export function metricsOf(panel: Panel): string[] {
  return [...panel.left, ...(panel.right ?? [])];
}

/** Asked for before any panel has been seen: a page's first row, and the seconds of an iteration, for the time left. */
export const FIRST = [...PANELS.slice(0, 4).flatMap(metricsOf), "time/iteration_s"];
