"""One step's updates, in one process or several.

The groups of a step are cut into `updates_per_step` minibatches, and each makes one optimizer update,
`num_iterations` times over. Within an update the completions are packed, each pack runs forward and backward
once, and the sums add up to the loss of the whole minibatch. Work that cannot change an update is left out:
the old-policy pass where the policy has not moved yet, the reference pass at beta 0, completions without
advantage when neither penalty nor bonus needs them.

Each process runs the groups of its own slots. What an update depends on is computed over all of them:
denominators, whether there is anything to do, and the number of backward passes, through packs and through
prompts that several packs share, for every process makes as many; one with fewer runs packs of weight 0. So the
number of processes changes the time of an update and not the update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mm_grpo.algorithm.masks import top_entropy_mask
from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.learner.credit import acting, after_masked, credit_metrics, weighed
from mm_grpo.learner.forward import PackForward, wrap_model
from mm_grpo.learner.forward_pass import ForwardPass, logprobs_and_entropies, score, states_on_host
from mm_grpo.learner.image_features import ImageFeatures
from mm_grpo.learner.lora import (
    adapted_layers,
    has_adapters,
    merge_lost,
    merged_layers,
    merged_tensors,
    save_adapter,
    sent_factors,
    without_adapters,
)
from mm_grpo.learner.loss import LossInputs, pack_loss
from mm_grpo.learner.minibatch import (
    ByCompletion,
    LogProbs,
    Minibatch,
    check_groups,
    make_minibatches,
)
from mm_grpo.learner.model import use_checkpointing
from mm_grpo.learner.optimizer import BaseOptimizer, Optimizer
from mm_grpo.learner.pack import Item, Pack, dummy_pack
from mm_grpo.learner.perception import MaskedPrompts, own_tokens, with_masked
from mm_grpo.learner.reference import load_reference_model
from mm_grpo.learner.step_report import (
    LearnerReport,
    LossStatistics,
    PackStatistics,
    gap_metrics,
    update_metrics,
)
from mm_grpo.learner.transformers_patches import save_pretrained
from mm_grpo.learner.twin_view import TwinPrompts
from mm_grpo.processors.base import Processor
from mm_grpo.timing import timed
from mm_grpo.types import Completion, Group, Prompt, UpdateRecord

R = TypeVar("R")


class Learner:
    """Trains `model` on groups. `total_updates` is the length of the learning-rate schedule.

    `adapted_layers` are those with adapters, `factored` those of them that the engine runs as factors, as it says.
    `ranks` are the processes that make the updates together; None is this one alone.
    """

    def __init__(
        self,
        model: Any,
        processor: Processor,
        config: GRPOConfig,
        total_updates: int,
        ranks: Ranks | None = None,
    ) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                f"model.path = '{config.model.path}': every parameter is frozen, so no update can happen; unfreeze "
                "some (model.freeze_vision, or requires_grad of the model that you passed in)"
            )
        self.model, self.processor, self.config = model, processor, config.with_correction()
        self.adapted_layers = adapted_layers(model)
        self.factored: frozenset[str] = frozenset()
        self.ranks = ranks or Ranks()
        # adapters, say, start from each process's random numbers
        self.ranks.broadcast_tensors(model.parameters())
        self.checkpointing = use_checkpointing(model, config.optim.gradient_checkpointing)
        wrap = partial(wrap_model, processor=processor, config=config)
        self.reference: PackForward | None = None
        if config.algorithm.beta > 0 and config.algorithm.reference_path is not None:
            self.reference = wrap(load_reference_model(config, model, processor))
        elif config.algorithm.beta > 0 and has_adapters(model):
            self.reference = wrap(model)  # run without its adapters
        elif config.algorithm.beta > 0:  # before ZeRO moves the weights into buffers of its own
            self.reference = wrap(copy.deepcopy(model).requires_grad_(False).eval())
        self.module = wrap(model)
        self.optimizer = _make_optimizer(self.module, config, total_updates, self.ranks)
        tower = {id(p) for p in processor.family.tower(model).parameters()}
        others = any(p.requires_grad and id(p) not in tower for p in model.parameters())
        # where the tower alone is trained, the loss of a text has no gradient but through a blank image
        self.module.blank_images = self.optimizer.reads_order or not others
        self._masked: MaskedPrompts | None = None
        self._twins = None if config.algorithm.twin_view is None else TwinPrompts(processor, config)
        self._work = PackStatistics()

    def update(self, groups: Sequence[Group]) -> LearnerReport:
        """Make the step's updates from this process's groups; the weights have changed in place on return.

        The report is that of the whole step, equal on every process. Raises ValueError (see `check_groups`).
        """
        algorithm = self.config.algorithm
        with self.ranks.fail_together("groups"):
            check_groups(groups, self.config.rollout.prompts_per_step)
        perceives, credit = algorithm.perception_coef > 0, algorithm.credit
        if self._twins is not None:
            self._twins.begin(groups)
        masked = MaskedPrompts(groups, self.processor, algorithm.option("perception_mask_ratio"))
        self._masked = masked if perceives else None
        minibatches = make_minibatches(groups, self.config, self.ranks, self.model.device)
        times = dict[str, float]()
        if credit is not None:  # before features are kept, for nothing else runs these prompts
            with timed(times, "time/credit"):
                items = after_masked(acting(groups, minibatches), masked, self.ranks)
                controlled = self._run(items, self.module)[0]
        self._keep_features(len(minibatches))
        logprobs = LogProbs([c.logprobs for g in groups for c in g.completions])
        if self.reference is not None and not algorithm.kl_in_reward:
            logprobs.reference = self._under_reference([i for m in minibatches for i in m.live])
        # the first minibatch meets the policy that sampled it; later ones need its log-probs from before, and so does
        # credit where an engine's may be those of another policy
        stale = credit is not None and self.config.rollout.max_staleness > 0
        for minibatch in minibatches[0 if stale else 1 :]:
            logprobs.old |= self._run(minibatch.live, self.module)[0]
        credited: dict[str, float] = {}
        if credit is not None:
            with timed(times, "time/credit"):
                pairs = [weighed(m, controlled, logprobs, algorithm, self.ranks) for m in minibatches]
                minibatches, weights = [m for m, _ in pairs], [w for _, w in pairs]
                credited = credit_metrics(weights, self.ranks) | times

        counted = sum(len(i.token_ids) for m in minibatches for i in m.items if i.counts)
        statistics = LossStatistics(algorithm.num_iterations * counted)
        updates: list[UpdateRecord] = []
        for _ in range(algorithm.num_iterations):
            for minibatch in minibatches:
                updates.append(self._update_on(minibatch, logprobs, statistics))
            logprobs.old = {**logprobs.first, **logprobs.old}
        versions = [tuple({v for _, v in c.weight_versions}) for g in groups for c in g.completions]
        report = self._report(statistics, updates, logprobs, versions)
        return replace(report, metrics=report.metrics | credited)

    def reference_logprobs(
        self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]
    ) -> list[list[list[float]]]:
        """Log-probs [T] of each prompt's completions under the reference policy, as sampled (mask, temperature)."""
        return self._answered(answered, self._under_reference)

    def current_logprobs(
        self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]
    ) -> list[list[list[float]]]:
        """The same under the present weights. Collective. What it runs is not counted as work of the step."""
        uncounted = PackStatistics()
        return self._answered(answered, lambda items: self._run(items, self.module, uncounted)[0])

    def score(
        self,
        prompt: Prompt,
        completions: Sequence[Sequence[int]],
        *,
        as_sampled: bool = False,
        as_sent: bool = False,
    ) -> list[list[float]]:
        """Log-probabilities [T] of each completion of `prompt` under the present weights: see `forward_pass.score`.

        With `as_sent` adapters are merged and rounded, as in `named_tensors`.
        """
        with merged_layers(self.model, self.factored) if as_sent else nullcontext():
            return score(self.model, self.processor, self.config, prompt, completions, as_sampled=as_sampled)

    def named_tensors(self, *, frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its in-memory name, tied ones under each name, and what adapters an engine takes apart.

        Adapters of the layers `factored` come as factors behind the weights, the others are merged. Without `frozen`
        weights are left out where all adapters are factors, and nothing else learns.
        """
        if frozen or not self.factored or self.factored != set(self.adapted_layers):
            yield from merged_tensors(self.model, self.factored)
        yield from sent_factors(self.model, self.factored)

    def save(self, path: str | Path) -> None:
        """Write weights (adapters merged), config, processor and chat template: a folder that loads without us."""
        own = {"state_dict": dict(merged_tensors(self.model))} if has_adapters(self.model) else {}
        save_pretrained(self.model, path, **own)
        self.processor.save(path)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters alone, for peft. Only where `model.lora` is set."""
        save_adapter(self.model, path, self.config.model.path)

    def merge_lost(self) -> float | None:
        """See `lora.merge_lost`: what an engine or a saved model does not get of the adapters' movement."""
        return merge_lost(self.model)

    # one update ------------------------------------------------------------------------------

    def _update_on(
        self, minibatch: Minibatch, logprobs: LogProbs, statistics: LossStatistics
    ) -> UpdateRecord:
        """One optimizer update: forward and backward of each pack, then the optimizer. Collective."""
        inputs, chosen = minibatch.inputs, None
        if self.config.algorithm.top_entropy_quantile < 1:
            inputs, chosen = self._top_entropy(minibatch)
        if self._twins is not None:
            with self.ranks.fail_together("twin views"):
                twins = self._twins.items(minibatch.live)
            self.module.teacher = self._pass(twins, self.module, states_on_host)
        with self.ranks.fail_together("planning packs"):
            most, copies = self.config.optim.max_tokens_per_pack, 1 if self._masked is None else 2
            planned = run = self.module.masks.plan(minibatch.live, most, copies)
            if self._masked is not None:
                run = [self._masked.with_twins(rows) for rows in planned]
        whole = ForwardPass(self.module, run, self.processor.media_token_ids, self._work)
        count = self.ranks.max(whole.backwards, "packs")
        if count == 0:
            return self.optimizer.skip()
        number = 0
        with whole:
            for rows, pack in zip(planned, whole.packs(), strict=True):
                logp, entropy, *kl = self.optimizer.forward(pack)
                own = pack if self._masked is None else own_tokens(pack, rows)
                logp, masked_logp = logp.tensor_split([len(own.completion_index)])
                tokens = logprobs.pack_tokens(own, logp, entropy[: len(logp)], chosen, minibatch.advantages)
                if self._masked is not None:
                    tokens = with_masked(tokens, rows, masked_logp)
                if self._twins is not None:
                    taught = [
                        item.index in self.module.teacher
                        for row in rows
                        for item in row
                        for _ in item.token_ids
                    ]
                    tokens = replace(
                        tokens, taught=torch.tensor(taught).to(logp.device), twin_kl=kl[0] if kl else None
                    )
                loss = pack_loss(self.config.algorithm, inputs, tokens, statistics)
                number += 1
                self.optimizer.backward(loss, last=number == count)
                for end in whole.ended(pack):
                    number += 1
                    self.optimizer.backward(self.optimizer.forward(end)[0], last=number == count)
        self.module.teacher = {}
        while number < count:
            number += 1
            dummy = dummy_pack(min(self.processor.stop_token_ids), self.processor.family.position_axes)
            logp, entropy = self.optimizer.forward(dummy)
            self.optimizer.backward((logp + entropy).sum() * 0.0, last=number == count)
        live = self.ranks.sum({"live": statistics.take_live()}, "live tokens")
        return self.optimizer.apply(int(live["live"]))

    def _top_entropy(self, minibatch: Minibatch) -> tuple[LossInputs, ByCompletion]:
        """Mask the tokens of the loss, 1 or 0 by completion.

        The quantile is that of all tokens of the update that carry weight, over all processes, so it takes a
        pass of its own before the first backward.
        """
        inputs, quantile = minibatch.inputs, self.config.algorithm.top_entropy_quantile
        weights = inputs.weights.tolist()
        weighted = [i for i in minibatch.items if weights[i.index] > 0]
        entropies = self._run(weighted, self.module)[1]
        own = torch.cat([*entropies.values(), torch.zeros(0, device=self.model.device)]).cpu()
        shares = self.ranks.all_gather(own, "entropies")
        every = torch.cat(shares)
        chosen = top_entropy_mask(every, torch.ones_like(every, dtype=torch.bool), quantile)
        mine = chosen.split([len(share) for share in shares])[self.ranks.rank].to(self.model.device)
        cuts = mine.float().split([len(values) for values in entropies.values()])
        return replace(inputs, tokens=int(chosen.sum())), dict(zip(entropies, cuts, strict=True))

    def _report(
        self,
        statistics: LossStatistics,
        updates: list[UpdateRecord],
        logprobs: LogProbs,
        versions: Sequence[tuple[int, ...]],
    ) -> LearnerReport:
        """The step's metrics over all processes; forgets what was kept for the step. Collective."""
        statistics.sums = self.ranks.sum(statistics.read(), "loss")
        work, self._work = self._work, PackStatistics()
        work.images += self.module.features.encoded if self.module.features is not None else 0
        self._use_features(None)
        self._masked = None
        if self._twins is not None:
            self._twins.begin(())
        metrics = {
            **statistics.metrics(len(updates)),
            **update_metrics(updates),
            **work.metrics(self.ranks, self.config.optim.max_tokens_per_pack),
        }
        gap, by_version = gap_metrics(logprobs.engine, logprobs.old, versions, self.ranks)
        return LearnerReport(metrics | gap, updates, by_version)

    # passes without gradients ----------------------------------------------------------------

    def _answered(
        self,
        answered: Sequence[tuple[Prompt, Sequence[Completion]]],
        logprobs: Callable[[Sequence[Item]], ByCompletion],
    ) -> list[list[list[float]]]:
        given = [(number, p, c) for number, (p, ours) in enumerate(answered) for c in ours]
        items = [Item(i, number, p, c.token_ids, tail=c.tail) for i, (number, p, c) in enumerate(given)]
        found = logprobs(items)
        values = (found[i].tolist() for i in range(len(items)))
        return [[next(values) for _ in ours] for _, ours in answered]

    def _run(
        self, items: Sequence[Item], module: PackForward, work: PackStatistics | None = None
    ) -> tuple[ByCompletion, ByCompletion]:
        """Log-probs [T] and entropies [T] of each completion under `module`, counted as `work`, None as the step's."""
        return self._pass(items, module, logprobs_and_entropies, work)

    def _pass(
        self,
        items: Sequence[Item],
        module: PackForward,
        read: Callable[[PackForward, Iterable[Pack]], R],
        work: PackStatistics | None = None,
    ) -> R:
        """What `read` makes of the packs of `items`. Collective."""
        with self.ranks.fail_together("a pass without gradients"):
            planned = module.masks.plan(items, self.config.optim.max_tokens_per_pack)
            with ForwardPass(module, planned, self.processor.media_token_ids, work or self._work) as whole:
                return read(module, whole.packs())

    def _under_reference(self, items: Sequence[Item]) -> ByCompletion:
        """Log-probabilities [T] of each completion under the reference policy."""
        assert self.reference is not None
        with without_adapters(self.reference.model):
            return self._run(items, self.reference)[0]

    def _keep_features(self, minibatches: int) -> None:
        """Keep image features over the passes of this step where there are several and the tower is frozen."""
        algorithm, family = self.config.algorithm, self.processor.family
        in_loss = self.reference is not None and not algorithm.kl_in_reward
        passes = algorithm.num_iterations * (2 if algorithm.top_entropy_quantile < 1 else 1) + in_loss
        several = passes > 1 or minibatches > 1
        kept = several and family.tower_is_frozen(self.model)
        self._use_features(ImageFeatures(self.model, family, keep=True) if kept else None)

    def _use_features(self, features: ImageFeatures | None) -> None:
        self.module.features = features
        # a reference of another path has another tower
        if self.reference is not None and self.config.algorithm.reference_path is None:
            self.reference.features = features


def _make_optimizer(
    module: PackForward, config: GRPOConfig, total_updates: int, ranks: Ranks
) -> BaseOptimizer:
    optim = config.optim.with_values({"learning_rate": config.learning_rate})
    if optim.offload_optimizer or (ranks.world > 1 and optim.zero_stage > 0):
        from mm_grpo.learner.zero import ZeroOptimizer

        return ZeroOptimizer(module, optim, total_updates, ranks)
    return Optimizer(module, optim, total_updates, ranks)
