"""Updates of a step, in one process or several.

The groups of a step are cut into `updates_per_step` minibatches, and each makes one optimizer update,
`num_iterations` times over. Within an update the completions are packed, each pack runs forward and backward
once, and the sums add up to the loss of the whole minibatch. Work that cannot change an update is left out:
the old-policy pass if the policy has not moved yet, the reference pass at beta 0, completions without
advantage if neither penalty nor bonus needs them.

Each process runs the groups of its own slots. Denominators, whether there is anything to do, and the number of
backward passes are taken over all processes, and a process with fewer passes runs packs of weight 0. So the number of
processes changes the time of an update and not the update. Loss features (`features/`) add passes, rows and terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.learner.alternate_prompts import AlternatePrompts
from mm_grpo.learner.features.base import FeaturePack, LossFeature
from mm_grpo.learner.features.table import feature_classes
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.forward_pass import ForwardPass, logprobs_and_entropies, score
from mm_grpo.learner.image_features import ImageFeatures
from mm_grpo.learner.learner_weights import LearnerWeights
from mm_grpo.learner.lora import as_frozen_base
from mm_grpo.learner.loss import pack_loss
from mm_grpo.learner.minibatch import ByCompletion, LogProbs, Minibatch, check_groups, make_minibatches
from mm_grpo.learner.model import use_checkpointing
from mm_grpo.learner.pack import Item, Pack
from mm_grpo.learner.reference import reference_model
from mm_grpo.learner.sharding import optimizer_class, shard_models
from mm_grpo.learner.shards import is_sharded, shares_weights
from mm_grpo.learner.step_report import (
    LearnerReport,
    LossStatistics,
    PackStatistics,
    gap_metrics,
    update_metrics,
)
from mm_grpo.processors.base import Processor
from mm_grpo.types import Completion, Group, Prompt, UpdateRecord

R = TypeVar("R")
Answered = Sequence[tuple[Prompt, Sequence[Completion]]]
"""Prompts, each with its completions."""


class Learner(LearnerWeights):
    """Trainer of `model` on groups. `total_updates` is the length of the learning-rate schedule.

    `ranks` are the processes that make the updates together; None is this one alone. Without `as_sampled` the loss is
    over the whole vocabulary at temperature 1, and not over the distribution that training samples from.
    """

    def __init__(
        self,
        model: Any,
        processor: Processor,
        config: GRPOConfig,
        total_updates: int,
        ranks: Ranks | None = None,
        *,
        as_sampled: bool = True,
    ) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                f"model.path = '{config.model.path}': every parameter is frozen, so no update can happen; unfreeze "
                "some (model.freeze_vision, or requires_grad of the model that you passed in)"
            )
        super().__init__(model, processor, config.with_correction(processor.family.routers(model)))
        self.ranks = ranks or Ranks()
        is_shared = shares_weights(config, self.ranks)
        if not is_shared:  # each process drew its own random numbers for weights that are new (LoRA)
            self.ranks.broadcast_tensors(model.parameters())
        self.checkpointing = use_checkpointing(model, config.optim.gradient_checkpointing)
        reference = reference_model(config, model, processor)
        if is_shared:
            shard_models((model, reference), processor.family, self.ranks, config.model.device)
        wrap = partial(PackForward, processor=processor, config=config, as_sampled=as_sampled)
        self.reference: PackForward | None = None if reference is None else wrap(reference)
        make_optimizer = optimizer_class(config, self.ranks)
        # beside a frozen embedding, only a blank image gives a text's first layers the gradient that an image's have
        frozen_start = not model.get_input_embeddings().weight.requires_grad
        self.module = wrap(model, blank_images=make_optimizer.reads_order or frozen_start)
        optim = config.optim.with_values({"learning_rate": config.learning_rate})
        self.optimizer = make_optimizer(self.module, optim, total_updates, self.ranks)
        self._work = PackStatistics()
        self.alternates: dict[str, AlternatePrompts] = {}
        self.features: list[LossFeature] = [feature(self) for feature in feature_classes(config.algorithm)]

    def update(self, groups: Sequence[Group]) -> LearnerReport:
        """Make the step's updates from this process's groups; the weights have changed in place on return.

        Return the report of the whole step, equal on every process. Raise ValueError (see `check_groups`).
        """
        algorithm = self.config.algorithm
        with self.ranks.fail_together("groups"):
            check_groups(groups, self.config.rollout.prompts_per_step)

        self.alternates = {}  # a step that failed may have left some
        has_gradient = [feature.has_gradient for feature in self.features]
        minibatches = make_minibatches(groups, self.config, self.ranks, self.model.device, has_gradient)
        # before image features are kept, because later passes do not run these prompts
        for feature in self.features:
            feature.begin_step(groups, minibatches)
        self._keep_image_features(len(minibatches))
        logprobs = LogProbs([c.logprobs for g in groups for c in g.completions])
        if self.reference is not None and not algorithm.kl_in_reward:
            logprobs.reference = self._reference_values([i for m in minibatches for i in m.live])
        # the first minibatch meets the policy that sampled it; later ones need its log-probs from before
        needs_first = any(feature.needs_old_logprobs for feature in self.features)
        for minibatch in minibatches[0 if needs_first else 1 :]:
            logprobs.old |= self.run(minibatch.live)[0]
        for feature in self.features:
            minibatches = feature.weigh(minibatches, logprobs)

        tokens = sum(len(i.token_ids) for m in minibatches for i in m.items if i.counts)
        statistics = LossStatistics(algorithm.num_iterations * tokens)
        updates: list[UpdateRecord] = []
        for _ in range(algorithm.num_iterations):
            for minibatch in minibatches:
                updates.append(self._update_on(minibatch, logprobs, statistics))
            logprobs.old = {**logprobs.first, **logprobs.old}
        versions = [tuple({v for _, v in c.weight_versions}) for g in groups for c in g.completions]
        return self._report(statistics, updates, logprobs, versions)

    def reference_logprobs(self, answered: Answered) -> list[list[list[float]]]:
        """Return log-probs [T] of each prompt's completions under the reference policy, as they are sampled."""
        return self._by_prompt(answered, self._reference_values)

    def current_logprobs(self, answered: Answered) -> list[list[list[float]]]:
        """Return the same under the present weights. Collective. The passes are not counted as work of the step."""
        uncounted = PackStatistics()
        return self._by_prompt(answered, lambda items: self.run(items, work=uncounted)[0])

    def score(
        self,
        prompt: Prompt,
        completions: Sequence[Sequence[int]],
        *,
        as_sampled: bool = False,
        as_sent: bool = False,
    ) -> list[list[float]]:
        """Return log-probs [T] of each completion of `prompt` under the present weights: see `forward_pass.score`.

        With `as_sent` the weights are merged and rounded as in `named_tensors`.
        """
        with self.weights_as_sent() if as_sent else nullcontext():
            return score(self.model, self.processor, self.config, prompt, completions, as_sampled=as_sampled)

    # one update ------------------------------------------------------------------------------

    def _update_on(
        self, minibatch: Minibatch, logprobs: LogProbs, statistics: LossStatistics
    ) -> UpdateRecord:
        """Make one optimizer update: forward and backward of each pack, then the optimizer. Collective."""
        for feature in self.features:
            minibatch = feature.begin_update(minibatch)
        with self.ranks.fail_together("planning packs"):
            copies = 1 + sum(feature.extra_copies for feature in self.features)
            packs = self.module.masks.plan(minibatch.live, self.config.optim.max_tokens_per_pack, copies)
            added = [[feature.added_rows(rows) for feature in self.features] for rows in packs]
            all_rows = [[*rows, *map(list, chain(*more))] for rows, more in zip(packs, added, strict=True)]
        forward_pass = ForwardPass(self.module, all_rows, self.processor.media_token_ids, self._work)
        count = self.ranks.max(forward_pass.backwards, "packs")
        if count == 0:
            return self.optimizer.skip()
        number = 0
        with forward_pass:
            for rows, more, pack in zip(packs, added, forward_pass.packs(), strict=True):
                result = self.optimizer.forward(pack, minibatch.kl_states)
                main, *parts = result.split([_token_count(part) for part in (rows, *more)])
                tokens = logprobs.pack_tokens(pack, main, minibatch)
                loss = pack_loss(self.config.algorithm, minibatch.inputs, tokens, statistics)
                for feature, part in zip(self.features, parts, strict=True):
                    term = feature.loss(
                        FeaturePack(rows, minibatch.inputs, tokens, part, main.kl), statistics
                    )
                    loss = loss if term is None else loss + term
                statistics.add(loss=loss)
                number += 1
                self.optimizer.backward(loss, last=number == count)
                for end in forward_pass.ended(pack):
                    number += 1
                    self.optimizer.backward(self.optimizer.forward(end).logp, last=number == count)
        while number < count:
            number += 1
            result = self.optimizer.forward(forward_pass.dummy())
            self.optimizer.backward((result.logp + result.entropy).sum() * 0.0, last=number == count)
        live = self.ranks.sum({"live": statistics.take_live()}, "live tokens")
        return self.optimizer.apply(int(live["live"]))

    def _report(
        self,
        statistics: LossStatistics,
        updates: list[UpdateRecord],
        logprobs: LogProbs,
        versions: Sequence[tuple[int, ...]],
    ) -> LearnerReport:
        """Return the step's metrics over all processes; drop what was kept for the step. Collective."""
        statistics.sums = self.ranks.sum(statistics.read(), "loss")
        work, self._work = self._work, PackStatistics()
        work.images += self.module.features.encoded if self.module.features is not None else 0
        self._use_image_features(None)
        self.alternates = {}
        metrics = {
            **statistics.metrics(len(updates)),
            **update_metrics(updates),
            **work.metrics(self.ranks, self.config.optim.max_tokens_per_pack),
        }
        gap, by_version = gap_metrics(logprobs.engine, logprobs.old, versions, self.ranks)
        metrics |= gap
        for feature in self.features:
            metrics |= feature.metrics(statistics.sums)
        return LearnerReport(metrics, updates, by_version)

    # passes without gradients ----------------------------------------------------------------

    def run(
        self, items: Sequence[Item], module: PackForward | None = None, work: PackStatistics | None = None
    ) -> tuple[ByCompletion, ByCompletion]:
        """Return log-probs [T] and entropies [T] of each completion (see `run_pass`). Collective."""
        return self.run_pass(items, logprobs_and_entropies, module, work)

    def run_pass(
        self,
        items: Sequence[Item],
        read: Callable[[PackForward, Iterable[Pack]], R],
        module: PackForward | None = None,
        work: PackStatistics | None = None,
    ) -> R:
        """Return what `read` makes of the packs of `items` under `module`, by default the policy's. Collective.

        What is run is counted as `work`, by default as the step's.
        """
        module, work = module or self.module, work or self._work
        with self.ranks.fail_together("planning packs"):
            packs = module.masks.plan(items, self.config.optim.max_tokens_per_pack)
        forward_pass = ForwardPass(module, packs, self.processor.media_token_ids, work)
        # processes that wait for weights of this one do not wait for its error
        waits = is_sharded(module.model)
        with nullcontext() if waits else self.ranks.fail_together("a pass without gradients"), forward_pass:
            return read(module, forward_pass.even_packs())

    def _by_prompt(
        self, answered: Answered, values_of: Callable[[Sequence[Item]], ByCompletion]
    ) -> list[list[list[float]]]:
        rows = [
            (number, prompt, c) for number, (prompt, completions) in enumerate(answered) for c in completions
        ]
        items = [
            Item(i, number, prompt, c.token_ids, tail=c.tail) for i, (number, prompt, c) in enumerate(rows)
        ]
        values = values_of(items)
        lists = (values[i].tolist() for i in range(len(items)))
        return [[next(lists) for _ in completions] for _, completions in answered]

    def _reference_values(self, items: Sequence[Item]) -> ByCompletion:
        """Return log-probs [T] of each completion under the reference policy."""
        assert self.reference is not None
        with as_frozen_base(self.reference.model):
            return self.run(items, self.reference)[0]

    def _keep_image_features(self, minibatches: int) -> None:
        """Keep image features over the passes of this step if there are several and the tower is frozen."""
        algorithm, family = self.config.algorithm, self.processor.family
        has_reference_pass = self.reference is not None and not algorithm.kl_in_reward
        passes = 1 + sum(feature.extra_passes for feature in self.features)
        several = algorithm.num_iterations * passes + has_reference_pass > 1 or minibatches > 1
        keep = several and family.tower_is_frozen(self.model)
        self._use_image_features(ImageFeatures(self.model, family, keep=True) if keep else None)

    def _use_image_features(self, features: ImageFeatures | None) -> None:
        self.module.keep_features(features)
        # a reference of another path has another tower
        if self.reference is not None and self.config.algorithm.reference_path is None:
            self.reference.keep_features(features)


def _token_count(rows: Iterable[Sequence[Item]]) -> int:
    return sum(len(item.token_ids) for row in rows for item in row)
