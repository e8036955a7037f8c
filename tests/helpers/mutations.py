r"""Single-line mutations of the package, and whether the tests that should catch each do: `killed`, or `LIVED`.

    python tests/helpers/mutations.py [--only 1,4,10-20]

It says what a smaller suite still catches. It is no test itself, and takes an hour on one core. It runs in a
copy of the tree. First the chosen tests run over the package as it is, and have to pass.

TABLE holds a block for each file: its path in mm_grpo, `<`, paths in tests, after `!` the marked tests that run too
(`slow`, `long`); then its mutations, a line each: the kind, `|`, what stands in exactly one line of the file, `==>`,
what is put there. With a `*` are those where one part hands a number to another: versions of weights, budgets of
tokens, seeds of turns, an optimizer's state, dtypes of sums, bounds, denominators. A fragment that is not found once is
an error: whoever changes that line changes the row, so that it still breaks the same thing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DEADLINE = 420.0
"""Seconds that the tests of one mutation may take: one that makes them hang is caught too."""

TABLE = r"""
algorithm/advantages.py < algorithm/test_advantages.py algorithm/test_advantage_laws.py
    wrong normaliser | "batch": step_std + EPSILON ==> "batch": std(row) + EPSILON
    dropped weight | objective.weight * d / divisor ==> d / divisor
    skipped check | if not numbers or max(numbers) == min(numbers): ==> if not numbers:
algorithm/turn_advantages.py < algorithm/test_turn_advantages.py
    dropped factor | reward if later is None else reward + gamma * later ==> reward if later is None else reward + later
algorithm/correction.py < algorithm/test_surrogate.py algorithm/test_against_trl.py algorithm/test_losses.py
    sign | gap = (old_logp - sampling_logp) ==> gap = (sampling_logp - old_logp)
algorithm/losses.py < algorithm/test_losses.py algorithm/test_surrogate.py algorithm/test_against_trl.py
    * bound of dppo_tv | change < -config.epsilon) ==> change < -_upper(config))
    * bound of dppo_kl | (divergence > config.epsilon) & ==> (divergence > _upper(config)) &
    * bound of gmpo | log_ratio.clamp(min=-config.epsilon)) ==> log_ratio.clamp(min=-_upper(config)))
    * denominator | 1.0 / max(int(lengths.sum()), 1) ==> 1.0 / max(len(lengths), 1)
    * denominator | max(len(lengths) * max_completion_length, 1) ==> max(int(lengths.sum()), 1)
    missing detach | ratio = torch.exp(weight).detach() ==> ratio = torch.exp(weight)
algorithm/credit.py < algorithm/test_credit_rules.py learner/test_credit.py
    denominator | return raw * len(raw) / raw.sum() ==> return raw / raw.sum()
    off by one | [: math.ceil(share * len(s) - 1e-9)] ==> [: math.floor(share * len(s) + 1e-9)]
    swapped | w * (before / after) if after ==> w * (after / before) if after
    * dtype of sums | perception_kl(logp.double(), control_logp.double()) ==> perception_kl(logp, control_logp)
algorithm/masks.py < algorithm/test_masks.py
    off by one | math.floor(share * (n - 1) + 1e-6) + 1 ==> math.floor(share * (n - 1) + 1e-6)
learner/loss.py < learner/test_minibatch.py learner/test_learner.py algorithm
    dropped mask | pack.entropy * active * pack.mask ==> pack.entropy * active
    dropped factor | token_loss + config.beta * kl ==> token_loss + kl
    sign | loss = loss - config.entropy_coef ==> loss = loss + config.entropy_coef
    * live tokens | live = active & ~no_gradient & (advantages != 0) ==> live = active & (advantages != 0)
learner/alternate_prompts.py < learner/test_twin_view.py learner/test_sight.py
    off by one | for c in group.completions) <= max_tokens ==> for c in group.completions) < max_tokens
    stale cache | self._prompts: dict[int, Prompt | None] = {} ==> self._prompts = require_images.__dict__
    wrong position | position_ids=tail.position_ids + shift) ==> position_ids=tail.position_ids - shift)
learner/features/twin_view.py < learner/test_twin_view.py
    sign | return self.algorithm.twin_view.coef ==> return -self.algorithm.twin_view.coef
    dropped mask | taught = (weights > 0) & pack.mask( ==> taught = (weights > 0) | pack.mask(
    wrong space | max(math.floor(y0) - ==> max(math.ceil(y1) -
    skipped check | == [i.size for i in images] else twin ==> == [] else twin
    wrong axis | images[0].width * images[0].height ==> images[0].width * images[0].width
    bound | max(math.floor(y0) - dy, 0) ==> math.floor(y0) - dy
learner/features/perception.py < learner/test_perception.py
    dropped condition | if not group.prompt.vision: ==> if False:
    wrong mask | pack.mask(lambda item: bool(item.prompt.vision)) ==> pack.mask(lambda item: True)
    wrong seed | torch.Generator().manual_seed(seed), prompt ==> torch.Generator().manual_seed(0), prompt
    squares of one frame | generator.set_state(state)) ==> generator)
learner/sight.py < learner/test_sight.py
    wrong tail | moved_tail(c.tail, g.prompt, prompt)) for ==> c.tail) for
    wrong kind | (self.videos, other.videos)) ==> (self.videos, other.images))
    dropped choice | if all_rows[slot].has_order] ==> if all_rows[slot].images]
data/blind.py < data/test_blind.py
    wrong pairs | zip_longest(moved[::2], moved[1::2]) ==> zip_longest(moved[1::2], moved[1::2])
    one order for all | random.Random(f"{control}/{sample.uid}") ==> random.Random(control)
learner/features/credit.py < learner/test_credit.py
    stale policy | for values in ({**engine, **logprobs.old}, control ==> for values in (engine, control
    swapped | map(dependency, logps, control_logps) ==> map(dependency, control_logps, logps)
    * means by process | [m for share in means for m in share], ==> means[ranks.rank],
    of one process | torch.cat(ranks.all_gather(torch.cat([*weights]), "credit")) ==> torch.cat([*weights])
learner/minibatch.py < learner/test_minibatch.py learner/test_learner.py learner/test_conversations.py
    * denominator | return weights, int(lengths.sum()) ==> return weights, len(lengths)
    * denominator | len(i.token_ids) if i.counts else 0) for ==> len(i.token_ids)) for
    stale policy | old_logp=to_pack_order(self.old, order, present) if self.old else present ==> old_logp=present
    dropped mask | return completion.masked is None and not truncated ==> return not truncated
learner/learner.py < learner/test_learner.py ! slow
    stale cache | {**logprobs.first, **logprobs.old} ==> {**logprobs.old, **logprobs.first}
learner/learner.py < learner/test_lora.py learner/test_reference_model.py
    skipped step | self.weights_as_sent() if as_sent ==> self.weights_as_sent() if False
warm_start.py < trained/test_warm_exact.py
    * bound | loss_type="cispo", epsilon_high=1.0 ==> loss_type="cispo", epsilon_high=0.2
    * wrong distribution | as_sampled=False ==> as_sampled=True
learner/learner_weights.py < learner/test_lora.py learner/test_reference_model.py
    * merges beside factors | self.factored == set(self.adapted_layers) ==> set(self.adapted_layers)
    * merged twice | lora.merged_tensors(self.model, self.factored) ==> lora.merged_tensors(self.model)
    * base not sent | if (frozen and not self.base_stays) or not self._all ==> if not self._all
    not merged | dict(lora.merged_tensors(self.model))} ==> dict(lora.merged_tensors(self.model, self.factored))}
learner/lora.py < learner/test_lora.py
    * merges beside factors | leaf == "weight" and owner not in factored ==> leaf == "weight" and not factored
    * merged twice | if name in factored: ==> if factored:
    * merges beside factors | _layers(model) if name not in factored] ==> _layers(model) if not factored]
    dropped factor | (up * layer.scaling[ADAPTER]).to(dtype) ==> up.to(dtype)
    dtype | lora_A.weight", down.to(dtype) ==> lora_A.weight", down
    dropped bias | inputs, _merged(layer, base.weight), base.bias) ==> inputs, _merged(layer, base.weight))
    * shared base | for name, p in parameters if not p.requires_grad} ==> for name, p in parameters}
build.py < learner/test_lora.py
    * shared base | or engine.adapter_layers(layers) != layers: ==> or not engine.adapter_layers(layers):
    * shared base | chain(merged_tensors(model, layers), ==> chain(merged_tensors(model),
learner/optimizer.py < learner/test_learner.py learner/test_overflow.py run/test_checkpoint.py ! slow
    * state on resume | state["step"].fill_(adam_steps) ==> state["step"].fill_(updates)
    * state on resume | self.updates = updates ==> self.updates = adam_steps
    * state on resume | return max((int(state["step"]) for ==> return self.updates or max((int(state["step"]) for
    * schedule | self.updates += 1 ==> self.updates += stepped
    * dtype of sums | _hook(partial(accumulate_into_master, master)) ==> _hook(lambda param: None)
    wrong group | {"params": plain, "weight_decay": 0.0} ==> {"params": plain, "weight_decay": config.weight_decay}
learner/sharding.py < distributed/test_zero_updates.py ! slow
    * mean for sum | part.set_gradient_divide_factor(1.0) ==> part.set_gradient_divide_factor(2.0)
    * untied head | if tied:  # torch ties ==> if False:  # torch ties
    * counted on each | whole in zip(self.masters, self.is_whole, strict=True) ==> whole in zip(self.masters, [0] * 999)
    * counted on each | if self.ranks.first or not whole:  # counted ==> if True:  # counted
    * not added up | for master, whole in pairs if whole]) ==> for master, whole in pairs if False])
learner/sharding.py < distributed/test_sharded_weights.py ! slow
    * whole model | fully_shard(unit, **options) ==> fully_shard(unit, reshard_after_forward=False, **options)
learner/shards.py < distributed/test_sharded_weights.py ! slow
    * wrong rows | get_local_rank() * -(-rows // mesh.size())) ==> get_local_rank() * (rows // mesh.size()))
    no dummies | ranks.max(count, "forwards") - count ==> 0 * ranks.max(count, "forwards")
learner/forward_pass.py < distributed/test_sharded_weights.py ! slow
    no dummies | yield from repeat(self.dummy(), missing) ==> yield from repeat(self.dummy(), 0)
learner/learner_weights.py < distributed/test_sharded_weights.py ! slow
    * base gathered | return self._all_factored and is_sharded(self.model) ==> return False
learner/learner.py < distributed/test_zero_updates.py ! slow
    no blank images | make_optimizer.reads_order or frozen_start) ==> make_optimizer.reads_order)
run/folder.py < distributed/test_sharded_weights.py ! slow
    lone process | waiting.pop(0)(None) ==> waiting.clear() if first else waiting.pop(0)(None)
learner/transformers_patches.py < distributed/test_sharded_weights.py ! slow
    lone process | for _ in tensors: ==> for _ in ():
    * two layers | part.clear()  # before ==> pass  # before
learner/prompt_states.py < learner/test_prompt_states.py
    * dtype of sums | grad.float() if total is None ==> grad if total is None
learner/logprobs.py < learner/test_logprobs.py
    * dtype of sums | else grad_head[columns].float() ==> else grad_head[columns]
    * dtype of sums | torch.zeros(hidden.shape, device=hidden.device) if ==> torch.zeros_like(hidden) if
    sign | grad_logp - grad_kl  # the ==> grad_logp + grad_kl  # the
    dropped factor | part_gap + part_mass * (q_shift - shift) ==> part_gap
learner/pack.py < learner/test_pack.py learner/test_shared_prefix.py
    off by one | source[0] = last ==> source[0] = at - 1
    dropped mask | ((key == prompt_of(query)) | (key == query)) ==> (key <= query)
    wrong position | first = prompt.next_position ==> first = len(prompt.token_ids)
    off by one | (place - window)[:, :, None] < place[:, None, :] ==> (place - window)[:, :, None] <= place[:, None, :]
learner/attention.py < learner/test_attention.py
    dropped window | self.dense = self.looks_ahead or self.window is not None ==> self.dense = self.looks_ahead
    wrong length | lambda: (key[:, :, :length], value[:, :, :length])) ==> lambda: (key, value))
learner/linear_attention.py < learner/test_linear_attention.py
    dropped mask | x.masked_fill(behind[:, :, None], 0.0) for x in (beta, decay) ==> x for x in (beta, decay)
learner/step_report.py < learner/test_learner.py
    * staleness | local.setdefault(min(versions[index]), []) ==> local.setdefault(max(versions[index]), [])
rollout/turns.py < rollout/test_turns.py
    * budget | sampling.max_tokens - conversation.run_length ==> sampling.max_tokens - conversation.run_length + 1
    * seeds by turn | self.seeds.of_turn(request.seed, turn) ==> self.seeds.of_turn(request.seed, 1)
    * skipped check | require_answers([request], [answer], self.version()) ==> None
rollout/conversation.py < rollout/test_turns.py
    * budget | len(self.start.token_ids) >= below: ==> len(self.start.token_ids) > below:
rollout/seeds.py < rollout/test_seeds.py rollout/test_turns.py
    * seeds by turn | start + (number * (self.max_turns - 1) + turn - 1) ==> start + (number + turn - 1)
rollout/success.py < rollout/test_success.py
    bound | score >= mark) ==> score > mark)
    dropped condition | if len(scores) == 1 and not any( ==> if not any(
rollout/engine.py < parity/test_gaps.py rollout/test_turns.py rollout/test_streams.py
    skipped check | if "generate" in vars(cls) and ==> if not vars(cls) and
    * budget | <= request.sampling.max_tokens or ==> <= request.sampling.max_tokens + 1 or
    * versions | weight_versions != ((0, version),): ==> weight_versions[0] != (0, version):
rollout/weights.py < rollout/test_weights.py
    stale cache | self._held.clear() ==> self._held.copy()
rollout/decode_cache.py < processors/test_families.py
    off by one | in_tail.expand(len(tail), -1)], 1) >= window ==> in_tail.expand(len(tail), -1)], 1) > window
    dropped window | in_tail.expand(len(tail), -1)], 1) >= window ==> (0 * in_tail).expand(len(tail), -1)], 1) >= window
    wrong scale | (size**-0.5 if scaling is None else scaling) ==> size**-0.5
rollout/group_metrics.py < rollout/test_collect.py
    denominator | sum(kl) / max(completion_tokens(groups), 1) ==> sum(kl) / max(len(kl), 1)
    denominator | sum(faults.values()) / max(len(answers), 1) ==> sum(faults.values()) / len(completions)
    wrong sample | fmean(stdev(r) if len(r) > 1 else 0.0 for r in values) ==> stdev(rewards if rewards[1:] else [0, 0])
rollout/evaluate.py < rollout/test_evaluate.py
    denominator | sum(row.clipped for row in rows) / len(lengths) ==> sum(row.clipped for row in rows) / len(rows)
    denominator | length=fmean(lengths) if ==> length=sum(lengths) / len(rows) if
    sign | [[fmean(s) - fmean(row.values)] ==> [[fmean(row.values) - fmean(s)]
    bound | best is not None and score <= best.score) ==> best is not None and score < best.score)
rollout/collect.py < rollout/test_collect.py trainer/test_dynamic_sampling.py rollout/test_turns.py ! slow
    * seeds by attempt | self.seeds.group(step, slot, attempt) ==> self.seeds.group(step, slot, 0)
rollout/vllm/requests.py < rollout/test_served_engine.py rollout/test_engine_limits.py rollout/test_seeds.py ! slow
    * seeds in a request | and last.seed + 1 == request.seed ==> and last.seed < request.seed
    * budget | if length + room > max_model_len: ==> if length + room > max_model_len + 1:
rollout/vllm/engine.py < rollout/test_vllm_handle.py
    * factors at rest | self._factors |= factors ==> self._factors = factors
    * factors at rest | received |= {name: digests[name] for name in factors} ==> received |= digests
    * dropped adapter | if self._factors:  # vLLM ==> if factors:  # vLLM
    earlier run | self._handle.adapter = None  # that of ==> pass  # that of
    earlier run | self._current = self._handle.owner is None ==> self._current = True
rollout/vllm/internals.py < rollout/test_vllm_handle.py
    * shared base | and torch.equal(part.to(parameter.device), parameter) ==> and part.shape == parameter.shape
    missing clone | parameter.data = parameter.data.clone() ==> parameter.data = parameter.data
    not shared | parameter.data = part ==> parameter.data = part.clone()
    skipped check | raise failures[0] ==> pass
rollout/served/plugin.py < rollout/test_served_transfer.py
    * earlier run | factors = init_info.group, {} ==> factors = init_info.group, self.account.factors
    * factors at rest | {name: digests[name] for name in self.digests.keys() & digests.keys()} ==> digests
    * dropped adapter | self.finished, self.put = True, not self.factors ==> self.finished, self.put = True, True
rollout/served/pool.py < rollout/test_served_engine.py rollout/test_served_faults.py ! slow
    * another version | if weights != self.current: ==> if ":" not in weights:
    * another version | self._require(server, answer.weights) ==> self._require(server, str(self.current))
rollout/served/transfer.py < rollout/test_served_transfer.py rollout/test_served_engine.py ! slow
    * missing clone | {name: tensor.detach().to("cpu", copy=True) for ==> {name: tensor.detach().to("cpu") for
    * another version | self.timeout))) == name ==> self.timeout)))[:8] == name[:8]
    missing clone | tensor.detach().to("cpu", copy=True).contiguous() ==> tensor.detach().to("cpu").contiguous()
    stale group | self._group_names.pop(client.url, None) ==> pass
    dropped worker | if any(account.group != ==> if all(account.group !=
rollout/served/engine.py < rollout/test_served_engine.py rollout/test_served_faults.py ! slow
    * stale digests | self._sent_digests |= digests ==> self._sent_digests = digests
    * version | version=lambda: self.version, ==> version=lambda: 0,
rollout/pipeline.py < trainer/test_lockstep.py ! slow
    * staleness | step + self.staleness, self.collector.max_steps) ==> step, self.collector.max_steps)
    * kept steps | if step <= self.learned + self.staleness) ==> if step < self.learned + self.staleness)
parity/fixed_completions.py < parity/test_fixed_completions.py
    * scale | * max(floor, *(scores.gap.mean for ==> * min(floor, *(scores.gap.mean for
    * scale | self.rounding = max(floor, *( ==> self.rounding = min(floor, *(
    * count | + 1 if lost else 0 ==> + 1 if lost else self._unmoved.get(name, 0)
    * dropped check | return is_broad and float(move.mean()) >= MIN_VISIBLE_MOVE and ==> return
    sign | error = now.difference - before ==> error = now.difference + before
    * dropped term | excess = abs(share) * size - len(move) * min( ==> excess = abs(share) * size - 0 * min(
    * stale scores | earlier = (self._first(name), recent[0], recent[-2]) ==> earlier = (recent[-2],)
    * late lies | earlier = (self._first(name), recent[0], recent[-2]) ==> earlier = (self._first(name),)
rollout/vllm/read_back.py < rollout/test_read_back.py
    wrong axis | .apply(layer, rows, None).t()) ==> .apply(layer, rows, None))
    off by one | rows[:, start:].fill_diagonal_(1) ==> rows[:, :].fill_diagonal_(1)
rollout/vllm/adapters.py < engines/test_vllm_adapters.py
    * dropped check | digest(buffer.contiguous() if differs else factor) ==> digest(factor)
parity/sync.py < parity
    * scale | min(self.limit, self._history.gap_limit) ==> self.limit
    * wrong prompt | return group, [group.prompt, *other_prompts[:1]] ==> return group, [group.prompt]
    * staleness | (self.version - version) * farthest ==> farthest
    threshold | and gap.mean > move / 2: ==> and gap.mean > move * 2:
health/checks.py < health/test_guards.py
    * bound | max(limit, MAX_GAP_PER_MOVE * move) ==> max(limit, move)
    * one live token | record.live_tokens > 0 and ==> record.live_tokens > 1 and
    * boundaries | record.boundaries != 1: ==> record.boundaries < 1:
processors/base.py < learner/test_twin_view.py
    dropped argument | "min_pixels": config.data.min_pixels, ==> "min_pixels": None,
processors/image_size.py < processors/test_resize.py processors/test_qwen_vl.py
    wrong axis | image.resize((width, height) ==> image.resize((height, width)
    skipped resize | if (image.height, image.width) == size: ==> if image.width == size[1]:
    another filter | Resampling.BICUBIC) ==> Resampling.BILINEAR)
    skipped check | following == current and all(current): ==> following == current:
processors/turn_ids.py < trained/test_warm_answers.py
    off by one | return answer[: end + 1] ==> return answer[:end]
processors/hf_processor.py < processors/test_families.py processors/test_qwen_vl.py
    dropped id | | {self.tokenizer.eos_token_id} ==> | set()
    skipped check | if count != len(media) * self.template_tokens.get(name, 0): ==> if False:
processors/qwen_vl.py < processors/test_qwen_vl.py processors/test_resize.py processors/test_families.py
    wrong key | image_processor.size if max_pixels else ==> image_processor.size if True else
processors/qwen_vl.py < processors/test_video_positions.py
    transformers' rule | int(positions[-1].max()) + 1, count ==> int(positions[-1][1:].max()) + 1, count
    dropped factor | block[0] = (block[0] * step).long() ==> block[0] = block[0].long()
    wrong time | {(first + last) / 2:.1f} seconds ==> {first:.1f} seconds
    one run | time, runs = 1, time ==> runs = 1
processors/family.py < processors/test_families.py
    wrong tokens | = ids.masked_fill(ids == video, model.config.image_token_id) ==> = ids
types.py < processors/test_family_videos.py
    wrong order | for part in media_parts(self.messages)] ==> for part in media_parts(self.messages)[::-1]]
processors/special_tokens.py < processors/test_special_tokens.py
    wrong order | key=lambda token: (-len(token), token) ==> key=lambda token: (len(token), token)
data/order.py < data/test_order.py
    wrong key | f"{self.seed}/spare" ==> self.seed
data/pass_rate_order.py < data/test_pass_rate_order.py
    wrong peak | 4 * rate * (1 - rate) ==> 4 * rate * (1 - rate / 2)
    wrong factor | rate + self.factor * (share - rate) ==> rate + (share - rate) / 2
    * late pass | self.factor, self.lag = factor, 2 + staleness ==> self.factor, self.lag = factor, 1 + staleness
data/mixture_order.py < data/test_mixture_order.py
    skipped check | if lag >= self.total: ==> if lag >= 0:
data/rows.py < data/test_rows.py data/test_prompt_forms.py data/test_row_settings.py data/test_video_rows.py
    skipped check | if {*indices} != {*range(len(of_row))}: ==> if len(indices) != len(of_row):
    wrong number | indices = [index - 1 for index in indices] ==> indices = list(range(len(indices)))
    skipped check | if not is_default: ==> if False:
    dropped limits | return {"type": medium, **read_limits(values, values["where"])} ==> return {"type": medium}
    dropped settings | next(entries[medium]) | part ==> part | next(entries[medium])
    dropped name | used.get(ours, ALIAS) for theirs ==> used.get(ours, "x") for theirs
    wrong medium | not listed["image"] and tags == [IMAGE_TAG] ==> tags == [IMAGE_TAG]
data/row_settings.py < data/test_video_rows.py
    skipped check | len(settings) < len(options) ==> False
    skipped check | not options.keys() <= legal_keys ==> False
data/blind.py < data/test_video_rows.py
    dropped numbers | return source.numbers, tuple( ==> return tuple(
data/media_columns.py < data/test_prompt_forms.py data/test_media_columns.py
    skipped check | if filled != [numbers[0][0] + at for at in range(len(filled))]: ==> if False:
data/layouts.py < data/test_prompt_forms.py data/test_layouts.py
    skipped check | if hits and hits != len(content): ==> if False:
messages.py < data/test_row_settings.py processors/test_image_limits.py
    wrong bound | min(max(part[key], low), high) for key ==> min(part[key], high) for key
data/images.py < data/test_images.py data/test_image_files.py
    skipped check | if bool(why) != bool(refusal(size, limits)): ==> if False:
    skipped step | return ImageOps.exif_transpose(image) ==> return image.copy()
data/fingerprint.py < data/test_fingerprint.py
    dropped part | [fields.messages, media, fields.other_columns] ==> [fields.messages, media]
rewards/outcome.py < rewards/test_outcome.py
    bound | score is not None and score < mark ==> score is not None and score <= mark
    dropped condition | spec.weight * score > 0 ==> spec.weight * score != 0
run/checkpoint.py < run/test_checkpoint.py trainer/test_trainer_again.py trainer/test_trainer_best.py ! slow
    * state on resume | "adam_steps": optimizer.adam_steps, ==> "adam_steps": optimizer.updates,
    skipped check | if manifest["frozen"] != identity["frozen"]: ==> if False:
    skipped check | if step_of(old) != spared: ==> if True:
run/same_run.py < run/test_run_folder.py run/test_checkpoint.py trainer/test_trainer_again.py ! slow
    skipped check | if sets != old_sets: ==> if False:
    dropped exception | return field not in NOT_NEUTRAL and any( ==> return any(
replay.py < trainer/test_replay.py ! slow
    * version of weights | if s < step - staleness]: ==> if s < step]:
    swapped stage | "advantage": ("advantage", "turn advantages"), ==> "advantage": ("reward",),
    skipped check | is_close = isinstance(old, float) and ==> is_close = isinstance(old, (int, float)) and
    dropped factor | - logged[n]), _square(logged[n] - before[n])) ==> - logged[n]), _square(logged[n]))
run/same_run.py < run/test_changed_rows.py
    skipped check | 2 * len(moved) > len(changed) ==> len(changed) < 0
    wrong row | changed += [(first + index, x, y) ==> changed += [(index, x, y)
run/rollout_log.py < run/test_evaluations.py trainer/test_trainer_best.py ! slow
    wrong key | if step not in (0, best, self.step): ==> if step not in (0, self.step):
run/json_records.py < run/test_json_records.py
    * spans on resume | if inner[-1] is ... else inner ==> if inner[-1] is ... else inner[:1]
"""


class Row(NamedTuple):
    number: int
    file: str
    kind: str
    old: str
    new: str
    tests: tuple[str, ...]
    marks: str


def rows() -> list[Row]:
    """The table. Raises SystemExit with all rows that the tree does not fit."""
    found: list[Row] = []
    faults: list[str] = []
    for block in re.split(r"\n(?! )", TABLE.strip()):
        head, *lines = block.split("\n")
        file, _, rest = head.partition(" < ")
        names, _, marked = rest.partition(" ! ")
        tests = tuple(f"tests/{name}" for name in names.split())
        marks = " and ".join(f"not {mark}" for mark in ("slow", "long") if mark not in marked.split())
        path = ROOT / "mm_grpo" / file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        faults += [f"{file}: there is no {test}" for test in tests if not (ROOT / test).exists()]
        for line in lines:
            kind, _, change = line.strip().partition(" | ")
            old, _, new = change.partition(" ==> ")
            if source.count(old) != 1:
                faults.append(f"{file}: found {source.count(old)} times: {old}")
            found.append(Row(len(found) + 1, file, kind, old, new, tests, marks))
    if faults:
        raise SystemExit("\n".join(faults))
    return found


def copy_of_tree(folder: Path) -> Path:
    """A copy of the tree's tracked and new files in `folder`."""
    tree = folder / "tree"
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(command, text=True).split("\0")):
        source, target = ROOT / name, tree / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return tree


def run_tests(tree: Path, tests: tuple[str, ...], marks: str, deadline: float) -> tuple[str, str, str]:
    """`passed`, `failed` or `late`, the test that failed, and the output. Raises SystemExit where pytest could not
    run them."""
    program = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(tree)}
    run = subprocess.Popen(
        program,
        cwd=tree,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = run.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        return "late", "", ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # with what the tests have started and left
            os.killpg(run.pid, signal.SIGKILL)
    if run.returncode > 1:
        raise SystemExit(f"pytest ended with {run.returncode}:\n{output[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return "failed" if run.returncode else "passed", failed[1] if failed else "", output


def numbers(text: str) -> set[int]:
    """What `--only` names, by numbers and ranges of them."""
    ends = [part.partition("-") for part in text.split(",")]
    return {n for first, _, last in ends for n in range(int(first), int(last or first) + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="numbers of rows: 1,4,10-20")
    arguments = parser.parse_args()
    wanted = [row for row in rows() if arguments.only is None or row.number in numbers(arguments.only)]
    lived = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copy_of_tree(Path(folder))
        for marks in sorted({row.marks for row in wanted}):
            tests = tuple(sorted({test for row in wanted if row.marks == marks for test in row.tests}))
            outcome, test, output = run_tests(tree, tests, marks, 4 * DEADLINE)
            if outcome != "passed":
                raise SystemExit(f"without a mutation {test or outcome}:\n{output[-3000:]}")
        for row in wanted:
            path, started = tree / "mm_grpo" / row.file, time.monotonic()
            kept, source = path.stat(), path.read_text(encoding="utf-8")
            path.write_text(source.replace(row.old, row.new), encoding="utf-8")
            # bytecode goes by size and seconds: no two versions of a file have the same time
            os.utime(path, (kept.st_atime, kept.st_mtime + row.number))
            outcome, test, _ = run_tests(tree, row.tests, row.marks, DEADLINE)
            path.write_text(source, encoding="utf-8")
            os.utime(path, (kept.st_atime, kept.st_mtime))
            verdict, seconds = "LIVED" if outcome == "passed" else "killed", time.monotonic() - started
            print(f"{row.number:3} {verdict} {seconds:4.0f} s  {row.file}: {row.kind}  {test}", flush=True)
            lived += verdict == "LIVED"
    print(f"{len(wanted) - lived} of {len(wanted)} killed, {lived} lived")


if __name__ == "__main__":
    main()
