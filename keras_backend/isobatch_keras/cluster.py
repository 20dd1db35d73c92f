"""A Keras model trained by several processes: what each has computed is weighted by its rows and added up."""

# pyright: reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
from keras.src.trainers.data_adapters import get_data_adapter

from isobatch.backend import Options
from isobatch.clusters import Cluster, write_whole
from isobatch.devices import Device
from isobatch.errors import BackendError, ClusterError
from isobatch_keras.mirror import Mirror
from isobatch_keras.state import Across, across, is_seed
from isobatch_keras.wrapper import Parallel, ParallelCall

__all__ = ["ClusterCall", "ClusterModel"]


_MEAN = "sum_over_batch_size"


class Member(Mirror):
    """A parallel model in each of several processes, which together train one model on one batch.

    Each process calls it, or its `fit`, on its rows. Gradients, running state, losses and metrics are those of all rows; `predict`
    and calls for inference need nobody else. Files are written by rank 0.

    Args:
        template: The model; every process gets the weights of rank 0.
        devices: Those of this process.
        options: As in `data_parallel`, but for those that `Cluster.check` refuses.
        output_device: Where outputs are joined.
        cluster: The processes; `None` for one by itself, which a copy of the model is.

    Raises:
        BackendError: Keras does not run on TensorFlow.
        ClusterError: The model, Keras or TensorFlow is not the same in every process.
        ValueError: An option is one that `Cluster.check` refuses.
    """

    def __init__(
        self,
        template: keras.Model,
        devices: tuple[Device, ...],
        options: Options,
        output_device: Device,
        cluster: Cluster | None = None,
    ) -> None:
        if keras.config.backend() != "tensorflow":
            msg = f"Expected Keras to run on tensorflow in a cluster, it runs on {keras.config.backend()}. Set KERAS_BACKEND=tensorflow."
            raise BackendError(msg)
        self.__dict__["cluster"] = cluster or Cluster()
        self.cluster.check(options)
        super().__init__(template, devices, options, output_device)
        if cluster is not None:
            self._agree(options)
            for variable in template.variables:
                variable.assign(cluster.collective.first(keras.ops.convert_to_numpy(variable.value)))
                if is_seed(variable):  # other masks than the other processes draw
                    variable.assign_add([cluster.rank, 0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on this process's rows."""
        step = Across(self.cluster.rank, self.add_up_tensors)
        token = across.set(step)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            across.reset(token)
            self.__dict__["_step"] = step

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile; the optimizer's gradients are those of all processes. Takes what `keras.Model.compile` takes.

        Raises:
            ValueError: A loss is no mean over the rows of a batch, and there are several processes.
        """
        loss = args[1] if len(args) > 1 else kwargs.get("loss")
        odd = [
            one for one in keras.tree.flatten(loss) if getattr(one, "reduction", _MEAN) not in {_MEAN, "mean"}
        ]
        if odd and self.cluster.size > 1:
            msg = (
                f"Expected losses that are means over the rows of a batch, got reduction={odd[0].reduction!r}: each process counts for its "
                f"rows. Use reduction={_MEAN!r}; sample weights may say what each row counts for."
            )
            raise ValueError(msg)
        super().compile(*args, **kwargs)
        optimizer = self.optimizer
        if optimizer is None or self.cluster.size == 1:
            return
        own = type(optimizer)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            # It looks at gradients first, and all processes must see the same.
            optimizer.__dict__["apply"] = partial(_apply, optimizer, own.apply, self, now=True)
        else:
            optimizer.__dict__["apply"] = partial(_apply, optimizer, own.apply, self, now=False)
            optimizer.__dict__["_clip_gradients"] = partial(_clip, optimizer, own._clip_gradients, self)  # noqa: SLF001

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train on this process's rows, in as many steps as the process with the most batches takes.

        Args:
            x: As `keras.Model.fit` takes it.
            y: Likewise.
            sample_weight: Likewise.
            batch_size: Rows of this process in a step.
            kwargs: What else it takes.

        Returns:
            The history; of all processes' rows.

        Raises:
            ClusterError: Processes differ in the number of steps, or only some know theirs.
        """
        if (
            kwargs.get("steps_per_epoch") is not None
            or kwargs.get("validation_split")
            or self.cluster.size == 1
        ):
            return super().fit(x, y, sample_weight=sample_weight, batch_size=batch_size, **kwargs)
        known = hasattr(x, "__len__") or hasattr(x, "cardinality") or isinstance(x, Mapping | Sequence)
        adapter = None
        steps = None
        if known:
            shuffle, weights = kwargs.get("shuffle", True), kwargs.get("class_weight")
            adapter = get_data_adapter(
                x,
                y,
                sample_weight,
                batch_size or (32 if _is_arrays(x) else None),
                None,
                shuffle if _is_arrays(x) else False,
                weights,
            )
            steps = adapter.num_batches
        everywhere = self.cluster.collective.exchange(steps)
        if len(set(everywhere)) == 1:
            return super().fit(x, y, sample_weight=sample_weight, batch_size=batch_size, **kwargs)
        if adapter is None or steps is None or None in everywhere:
            shown = ", ".join("unknown" if one is None else str(one) for one in everywhere)
            msg = (
                f"Expected every process to know how many steps an epoch has, got {shown} by rank. Give steps_per_epoch=..., or data "
                "of known length, such as a dataset with assert_cardinality."
            )
            raise ClusterError(msg)
        from isobatch_keras._tensorflow_cluster import with_empty_steps

        kwargs.pop("class_weight", None)
        kwargs.pop("shuffle", None)
        return super().fit(with_empty_steps(adapter.get_tf_dataset(), max(everywhere), steps), **kwargs)

    def train_on_batch(self, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
        """Train on this process's rows; takes what `keras.Model.train_on_batch` takes, and returns loss and metrics of all rows."""
        return self._of_all(
            super().train_on_batch(*args, return_dict=True, **kwargs), return_dict=return_dict
        )

    def test_on_batch(self, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
        """Test on this process's rows; takes what `keras.Model.test_on_batch` takes, and returns loss and metrics of all rows."""
        return self._of_all(super().test_on_batch(*args, return_dict=True, **kwargs), return_dict=return_dict)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Write the template's file, in rank 0, whole or not at all; takes what `keras.Model.save` takes."""
        self._write(super().save, filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Write the template's weights, in rank 0, whole or not at all; takes what `keras.Model.save_weights` takes."""
        self._write(super().save_weights, filepath, *args, **kwargs)

    def _write(self, write: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if self.cluster.rank == 0:
            write_whole(Path(filepath), lambda file: write(file, *args, **kwargs))

    def _agree(self, options: Options) -> None:
        template = self.template
        self.cluster.agree(
            {
                "keras": keras.__version__,
                "model": type(template).__qualname__,
                "options": options,
                **{
                    f"weight {i}, {v.path}": f"{tuple(v.shape)} {v.dtype} trained={v.trainable}"
                    for i, v in enumerate(template.variables)
                },
            }
        )

    def add_up_tensors(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums over all processes of tensors of float."""
        from isobatch_keras._tensorflow_cluster import add_up

        return add_up(self.cluster.collective, tensors)

    def _of_all(self, logs: Any, *, return_dict: bool) -> Any:
        logs = {name: float(value) for name, value in self._get_metrics_result_or_logs(logs).items()}
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Return metrics of all processes, at the end of an epoch; their variables are sums over rows, as Keras means them to be."""
        variables = [variable for metric in self.metrics for variable in metric.variables]
        sums = self.add_up_tensors([variable.value for variable in variables]) if variables else []
        with keras.StatelessScope(state_mapping=list(zip(variables, sums, strict=True))):
            return super()._get_metrics_result_or_logs(logs)


class ClusterModel(Member, Parallel):
    """One process's part of a functional model."""


class ClusterCall(Member, ParallelCall):
    """One process's part of a subclassed model."""


def _is_arrays(x: Any) -> bool:
    return (
        not hasattr(x, "cardinality")
        and not isinstance(x, keras.utils.PyDataset)
        and not hasattr(x, "batch_sampler")
    )


def _apply(
    optimizer: Any,
    apply: Any,
    model: Member,
    grads: Sequence[Any],
    trainable_variables: Any = None,
    *,
    now: bool,
) -> Any:
    """Let each gradient count for the rows that this process had."""
    from isobatch_keras._tensorflow_cluster import weighted

    step: Across = model.__dict__["_step"]
    grads = [None if grad is None else weighted(grad, step.weight) for grad in grads]
    return apply(optimizer, _summed(model, grads) if now else grads, trainable_variables)


def _clip(optimizer: Any, clip: Any, model: Member, grads: Sequence[Any]) -> Any:
    """Add gradients up over all processes: only when weights are updated, so not while they accumulate."""
    return clip(optimizer, _summed(model, grads))


def _summed(model: Member, grads: Sequence[Any]) -> list[Any]:
    given = [grad for grad in grads if grad is not None]
    rest = iter(model.add_up_tensors(given) if given else ())
    return [None if grad is None else next(rest) for grad in grads]
