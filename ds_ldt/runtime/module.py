"""``LDTPipelineModule``: the layers of one rank, cut into virtual stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ldt.comm.agreement import agree
from ds_ldt.comm.grid import LDTPipelineGrid, LDTTopology
from ds_ldt.comm.identity import ModelFingerprint, RunIdentity
from ds_ldt.comm.launch import init_distributed, prepare_environment
from ds_ldt.comm.wire import DEFAULT_SCHEMA, WireSchema, WireTensor
from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.config.schema import JobConfig, load_config
from ds_ldt.errors import Absent, ConfigError
from ds_ldt.models.lora import plan_adapters
from ds_ldt.plan.size import check_job
from ds_ldt.runtime.layer_runner import Payload, inside_of, intervals_by_chunk, run_segments, seeded, with_local
from ds_ldt.runtime.optimizer_checks import recipe_problems
from ds_ldt.runtime.rng import Place
from ds_ldt.runtime.shape_inference import Shapes
from ds_ldt.topology.layout import Layout
from ds_ldt.topology.ranks import RankMap


class LDTPipelineModule(PipelineModule):
    """A list of layers, of which this rank builds the virtual stages that it holds.

    It takes the place of ``deepspeed.PipelineModule``. The layers are cut by ``ldt.pipeline_num_layers`` instead of a
    partition method, and a rank may hold several virtual stages (the edge holds the first and the last).
    Initial weights depend on ``base_seed`` and on the index of a layer alone, never on the split.

    Args:
        layers: every layer of the model, in order: ``LayerSpec``, ``TiedLayerSpec``, ``nn.Module`` or a callable from
            payload to payload. Layers that share a ``TiedLayerSpec`` key must be on the same stage.
        config: path, mapping or ``JobConfig``: a DeepSpeed JSON with an ``"ldt"`` section.
        loss_fn: ``(outputs, labels) -> scalar``, the mean loss of a micro-batch, evaluated on the edge, or ``(scalar,
            {"name": value})`` with further values to average and report. None: the last layer returns that.
        wire: what may cross a boundary between two virtual stages. Default: one float tensor with a gradient.
        num_leading: layers at the start of ``layers`` that join the first cell without being counted in
            ``pipeline_num_layers`` (an embedding).
        num_between: the same between two modalities (merger, text embedding); they are on the edge.
        num_trailing: the same at the end of ``layers`` (final norm, output head).
        depths: for a model of two modalities, the number of layers of each: ``{"vision_encoder": 32, "text_decoder":
            28}``; ``layers`` then holds leading, vision, joining, text and trailing layers, in this order.
        local_layers: indices of layers on the edge that are called ``layer(payload, local)``, local being a tuple of
            tensors of the micro-batch that stays on the edge (token ids, where a middle chunk needs them).
        batch_fn: edge only; turns what the data iterator yields into ``(inputs, labels)``, or with ``local_layers``
            into ``(inputs, labels, local)``.
        count_targets: edge only; ``labels -> int``, the number of targets a micro-batch's loss is a mean over. Needed
            for ``"loss_reduction": "token"``.
        loss_reduction: what ``ldt.loss_reduction: null`` means for this model: ``"micro_batch"`` or ``"token"``.
        sent_shapes: edge only; ``(inputs, local, boundary) -> ((dtype, shape), ...)`` of what the edge will send over
            a boundary, for models that should not be traced to find out, or None to have it traced. Default: each
            virtual stage of the edge is run on the meta device, once for each input shape.
        parts: names for ``ldt.freeze`` and what they stand for: indices of layers, or ``(index, prefix)`` for the
            parameters of a layer whose names start so.
        layer_names: for ``ldt.lora``, the name of each layer in the unsplit model; default ``model.layers.{index}``.
        model_type: for ``ldt.lora``, whose default target modules to take, by transformers' name.
        fingerprint: the model that both sites and every checkpoint have to be of; None where that is not known.
        base_seed: seed of the initial weights, layer i uses ``base_seed + i``; and of what layers draw in training
            (see ``ds_ldt.runtime.rng``).
        activation_checkpoint_interval: checkpoint activations every so many layers; 0 turns it off. A value in the
            JSON's ``pipeline`` section wins, and over that ``ldt.activation_checkpoint_interval``, which has one for
            each chunk.
        checkpointable_layers: class names to which activation checkpointing is limited.
        dynamic_shape: whether the micro-batches of a run may differ in shape.

    Attributes:
        run: this run, and those that it was resumed from; what its checkpoints are told apart by.
        has_engine: True once ``ds_ldt.initialize`` has made an engine for it.

    Raises:
        ConfigError: bad configuration, on every rank before any process group is created; or the sites' configurations
            differ, on every rank.
        LinkError: the ranks did not all meet within ``ldt.timeout_s``.
    """

    has_engine = False

    def __init__(
        self,
        layers: Sequence[LayerSpec | nn.Module | Callable[[Payload], Payload]],
        config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        wire: WireSchema | Sequence[WireTensor] | None = None,
        num_leading: int = 0,
        num_between: int = 0,
        num_trailing: int = 0,
        depths: Mapping[str, int] | None = None,
        local_layers: Collection[int] = (),
        batch_fn: Callable[[Any], tuple[Any, ...]] | None = None,
        count_targets: Callable[[Any], int] | None = None,
        loss_reduction: str = "micro_batch",
        sent_shapes: Callable[[Any, tuple[Tensor, ...], int], Shapes | None] | None = None,
        parts: Mapping[str, Iterable[int | tuple[int, str]]] | None = None,
        layer_names: Sequence[str] | None = None,
        model_type: str | None = None,
        fingerprint: ModelFingerprint | None = None,
        base_seed: int = 1234,
        activation_checkpoint_interval: int = 0,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = True,
    ) -> None:
        nn.Module.__init__(self)  # the parent's constructor insists on a cartesian topology and one layer range
        environment = prepare_environment()
        self.job = load_config(config, world_size=environment.world_size)
        self._layer_specs = list(layers)
        self._num_layers = len(self._layer_specs)
        joining = {"num_leading": num_leading, "num_between": num_between, "num_trailing": num_trailing}
        self.layout = self._lay_out(depths, **joining)
        self.loss_reduction = self.job.ldt.loss_reduction or loss_reduction
        self.loss_fn = loss_fn
        self.batch_fn = batch_fn
        self.count_targets = count_targets
        self.local_layers = frozenset(local_layers)
        self.sent_shapes = sent_shapes
        self.wire = _wire_schema(wire)
        self.dynamic_shape = dynamic_shape
        self.fingerprint = fingerprint
        self._check()
        frozen = frozen_parameters(self.job.ldt.freeze, parts or {})
        self._has_adapters, lora = False, self.job.ldt.lora
        plan = partial(plan_adapters, layers=self._layer_specs, names=layer_names, model_type=model_type)
        self.adapters = None if lora is None else plan(lora)

        self.run = RunIdentity(run=self._meet(base_seed))
        self.world_group = dist.group.WORLD
        self.global_rank = self._grid.global_rank
        self.world_size = self._grid.world_size
        self.local_rank = environment.local_rank
        self.num_stages, self.stage_id = self.layout.num_stages, self._grid.stage_id

        self._configure_activation_checkpointing(activation_checkpoint_interval, checkpointable_layers)
        self._build_virtual_stages(base_seed)
        freeze_parameters(self._modules_by_layer(), frozen)
        self.to(get_accelerator().device_name(self.local_rank))

    def _meet(self, base_seed: int) -> str:
        """Join the ranks of both sites, make sure that all mean the same job, and return the identity of the run."""
        rank_map = RankMap.from_config(self.job)
        init_distributed(self.job.ldt.timeout_s, deepspeed_config=self.job.deepspeed, sites=rank_map.sites)
        self._topo = LDTTopology(rank_map)
        self._grid = LDTPipelineGrid(self._topo, timeout_s=self.job.ldt.timeout_s)
        return agree(
            self.job,
            self._grid,
            layers=self._layer_specs,
            wire=self.wire,
            base_seed=base_seed,
            fingerprint=self.fingerprint,
        )

    def _lay_out(self, depths: Mapping[str, int] | None, **joining: int) -> Layout:
        """Cut the layers as configured; with ``depths`` they are those of both modalities and what joins them."""
        layout = Layout.build(
            self.job.ldt.pipeline_num_layers,
            num_layers=self._num_layers - sum(joining.values()) if depths is None else depths,
            allow_exposed_edge=self.job.ldt.allow_exposed_edge,
            **joining,
        )
        if layout.num_layers != self._num_layers:
            raise ConfigError.of(
                "layers",
                found=Absent(f"{self._num_layers} layers"),
                expected=f"{layout.num_layers}, those of depths={depths} and those that join them",
                fix="correct depths= or the number of leading, joining and trailing layers",
            )
        return layout

    def _check(self) -> None:
        """Find what is wrong with the recipe and the layers of this layout before any process group exists."""
        problems = list(recipe_problems(self.job))
        if problems:
            raise ConfigError.from_problems(problems)
        for name in ("loss_fn", "batch_fn", "count_targets", "sent_shapes"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                found = Absent(type(getattr(self, name)).__name__)
                raise ConfigError.of(name, found=found, expected="a function, or None", fix="pass the function itself")
        check_job(self.job, self.layout)
        self._check_ties()
        self._check_local_layers()
        self._check_loss_reduction()

    def _check_ties(self) -> None:
        """Tied layers share one module, so they must live on one stage; across stages the copies would drift."""
        stages: dict[str, int] = {}
        for index, layer in enumerate(self._layer_specs):
            if not isinstance(layer, TiedLayerSpec):
                continue
            stage = self.layout.stage_of_layer(index)
            first = stages.setdefault(layer.key, stage)
            if stage != first:
                raise ConfigError.of(
                    "ldt.pipeline_num_layers",
                    found=self.layout.configured,
                    expected=f"all layers tied by {layer.key!r} on one stage; they are on stages {first} and {stage}",
                    fix="move the tied layers to the same stage (the edge holds the first and the last layers)",
                )

    def _check_local_layers(self) -> None:
        """What local layers take besides never leaves the edge, so they must be there."""
        for index in sorted(self.local_layers):
            if self.layout.stage_of_layer(index) != EDGE_STAGE:
                raise ConfigError.of(
                    "ldt.pipeline_num_layers",
                    found=self.layout.configured,
                    expected=f"layer {index} on stage 0, the edge: it takes what stays there",
                    fix="move it to the edge",
                )

    def _check_loss_reduction(self) -> None:
        if self.loss_reduction == "token" and self.count_targets is None:
            raise ConfigError.of(
                "ldt.loss_reduction",
                found="token",
                expected="a model that says how many targets a micro-batch has",
                fix='pass count_targets= to LDTPipelineModule, or set "loss_reduction": "micro_batch"',
            )

    def _configure_activation_checkpointing(self, interval: int, checkpointable_layers: list[str] | None) -> None:
        pipeline = self.job.deepspeed.get("pipeline", {})
        self.activation_checkpoint_interval = pipeline.get("activation_checkpoint_interval", interval)
        self.checkpoint_intervals = intervals_by_chunk(self.job, self.layout.num_chunks, default=interval)
        self.use_reentrant = bool(pipeline.get("use_reentrant", False))
        self.activation_checkpoint_func = checkpoint
        self.checkpointable_layers = checkpointable_layers
        self.is_checkpointable_results: list[bool] = []

    def _build_virtual_stages(self, base_seed: int) -> None:
        """Build the layers of every virtual stage of this rank, each layer under a seed of its own."""
        self.seed_layers, self.seed_fn, self.base_seed = True, torch.manual_seed, base_seed
        self.fwd_map: dict[str, int] = {}
        self.tied_modules = nn.ModuleDict()
        self.tied_weight_attrs: dict[str, list[str]] = {}
        self.tied_comms: dict[str, Any] = {}  # a tie within one stage is one tensor and needs no messages
        self.virtual_stage_funcs: dict[int, list[Callable[[Any], Any]]] = {}
        self.layer_indices: list[int] = []
        forward_funcs: list[Callable[[Any], Any]] = []
        with torch.random.fork_rng(devices=[]):
            for virtual_stage in self.layout.virtual_stages_of(self.stage_id):
                self.forward_funcs: list[Callable[[Any], Any]] = []
                self._set_bounds(virtual_stage.start, virtual_stage.stop)
                self._build()
                self.virtual_stage_funcs[virtual_stage.index] = self.forward_funcs
                self.layer_indices += range(virtual_stage.start, virtual_stage.stop)
                forward_funcs += self.forward_funcs
        self.forward_funcs = forward_funcs

    def inject_adapters(self) -> None:
        """Put in the adapters of ``ldt.lora``, if any, and freeze all else: once, and after base weights are loaded.

        ``ds_ldt.initialize`` and ``from_pretrained`` call it; call it before you make an optimizer of your own.
        Start values depend on ``base_seed`` and the index of a layer.
        """
        if self.adapters is None or self._has_adapters:
            return
        self._has_adapters = True
        for index, layer in self.owned_layers().items():
            adapted = self.adapters.put_into(layer, index, seed=self.base_seed + index)
            if adapted is not layer:
                self.add_module(str(index), adapted)
                for funcs in (self.forward_funcs, *self.virtual_stage_funcs.values()):
                    funcs[:] = [adapted if func is layer else func for func in funcs]

    def _modules_by_layer(self) -> dict[int, nn.Module]:
        """The module behind each layer of this rank; both layers of a tied pair have the same."""
        found: dict[int, nn.Module] = {}
        for index, func in zip(self.layer_indices, self.forward_funcs, strict=True):
            layer = self._layer_specs[index]
            module = self.tied_modules[layer.key] if isinstance(layer, TiedLayerSpec) else func
            if isinstance(module, nn.Module):
                found[index] = module
        return found

    def owned_layers(self) -> dict[int, nn.Module]:
        """The modules that this rank holds, by global pipeline layer index; a tied module appears once."""
        owned: dict[int, nn.Module] = {}
        for index, layer in self._modules_by_layer().items():
            if all(layer is not other for other in owned.values()):
                owned[index] = layer
        return owned

    def trained_parameters(self, virtual_stage: int) -> list[nn.Parameter]:
        """The parameters used in a virtual stage of this rank that are trained, each once."""
        spec, held = self.layout.virtual_stages[virtual_stage], self._modules_by_layer()
        modules = [held[index] for index in range(spec.start, spec.stop) if index in held]
        used = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
        return [parameter for parameter in used if parameter.requires_grad]

    def forward(
        self,
        inputs: Payload,
        *,
        virtual_stage: int,
        local: tuple[Tensor, ...] = (),
        inside: Callable[[], AbstractContextManager[Any]] | None = None,
        place: Place | None = None,
    ) -> Payload:
        """Run the layers of one virtual stage.

        Args:
            inputs: the micro-batch for the head, else what the previous virtual stage sent.
            virtual_stage: index of a virtual stage that this rank holds.
            local: what its local layers take besides.
            inside: makes a context for a layer to run in, now and when a checkpoint runs it again; None for none.
            place: the micro-batch, by which each layer's random numbers are seeded, now and when a checkpoint runs the
                layer again; None leaves the generators as they are.

        Returns:
            What the last of its layers returns.
        """
        layers = self.virtual_stage_funcs[virtual_stage]
        first, chunk = self.layout.virtual_stages[virtual_stage].start, self.layout.virtual_stages[virtual_stage].chunk
        funcs = [
            partial(with_local, func, local) if index in self.local_layers else func
            for index, func in enumerate(layers, start=first)
        ]
        if inside is not None:
            funcs = [partial(inside_of, inside, func) for func in funcs]
        if place is not None:
            funcs = [partial(seeded, place.seed_of(layer), func) for layer, func in enumerate(funcs, first)]
        outputs: Payload = run_segments(
            funcs,
            inputs,
            interval=self.checkpoint_intervals[chunk],
            reentrant=self.use_reentrant,
            is_checkpointable=lambda segment: bool(self._is_checkpointable(layers[segment])),
        )
        return outputs

    def _precompute_checkpointable_values(self) -> None:
        """Nothing to cache: the engine asks for it, but segments are decided per virtual stage in ``forward``."""

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a global pipeline layer."""
        return self.layout.stage_of_layer(layer_idx)

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Path of a layer file: ``layer_XX-model_states.pt``, XX the global pipeline layer index."""
        return self._at_layer(super().ckpt_layer_path, ckpt_dir, local_layer_idx)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """The files of a layer in a checkpoint directory, one per tensor parallel rank."""
        return self._at_layer(super().ckpt_layer_path_list, ckpt_dir, local_layer_idx)

    def _at_layer(self, path_of: Callable[[str, int], Any], ckpt_dir: str, local_layer_idx: int) -> Any:
        # The parent adds _local_start, the start of the last virtual stage that was built.
        return path_of(ckpt_dir, self.layer_indices[local_layer_idx] - self._local_start)


def frozen_parameters(
    freeze: Sequence[str], parts: Mapping[str, Iterable[int | tuple[int, str]]]
) -> list[tuple[int, str]]:
    """What ``ldt.freeze`` names, as pairs of a layer index and a prefix of parameter names.

    Raises:
        ConfigError: a name is not one of the model's parts.
    """
    for name in freeze:
        if name not in parts:
            raise ConfigError.of(
                "ldt.freeze",
                found=name,
                expected=f"parts of this model: {', '.join(parts)}" if parts else "nothing: this model names no parts",
                fix="name one of them" if parts else "remove it, or pass parts= to LDTPipelineModule",
            )
    named = [entry for name in freeze for entry in parts[name]]
    return [entry if isinstance(entry, tuple) else (entry, "") for entry in named]


def freeze_parameters(modules: Mapping[int, nn.Module], frozen: Iterable[tuple[int, str]]) -> None:
    """Leave parameters out of training.

    Args:
        modules: layers by their global index.
        frozen: pairs of a layer index and a prefix of parameter names; layers that are not held are passed over.
    """
    for index, prefix in frozen:
        for name, parameter in modules[index].named_parameters() if index in modules else ():
            if name.startswith(prefix):
                parameter.requires_grad_(False)


def _wire_schema(wire: WireSchema | Sequence[WireTensor] | None) -> WireSchema:
    if isinstance(wire, WireSchema):
        return wire
    return DEFAULT_SCHEMA if wire is None else WireSchema(tensors=tuple(wire), uniform=False)
