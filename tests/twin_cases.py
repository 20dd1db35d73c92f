"""Small Keras models, one or a few for each layer that a twin knows, with weights that hide no fault."""

from __future__ import annotations

import inspect

import keras
import numpy as np

L = keras.layers
K = keras.ops


def scramble(model, seed=0):
    """Give a model weights in which every one counts: fresh ones are zeros and ones in many places."""
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if "float" in variable.dtype:
            values = rng.uniform(-0.6, 0.6, variable.shape)
            positive = any(word in variable.path for word in ("variance", "gamma", "scale"))
            variable.assign(np.abs(values) + 0.5 if positive else values)
    return model


def image(*shape):
    return keras.Input(shape or (9, 8, 3), name="image")


def sequence(*shape):
    return keras.Input(shape or (7, 4), name="sequence")


def on(layer, x=None):
    """A model of one layer."""
    x = image() if x is None else x
    return keras.Model(x, layer(x))


def masked(layer, **settings):
    """A layer behind an embedding that masks zeros."""
    x = keras.Input((7,), dtype="int32", name="words")
    return keras.Model(x, layer(L.Embedding(11, 4, mask_zero=True, **settings)(x)))


def batch_for(model, seed=1):
    rng = np.random.default_rng(seed)

    def one(tensor):
        shape = (3, *(5 if size is None else size for size in tensor.shape[1:]))
        if "int" in tensor.dtype:
            words = rng.integers(1, 9, shape)
            if words.ndim > 1:
                words[0, -3:] = 0
                words[1, :1] = 0
            return words.astype(tensor.dtype)
        return rng.standard_normal(shape)

    functional = model if hasattr(model, "input") else model._functional
    return keras.tree.map_structure(one, functional.input)


def _convolutions():
    for padding in ("valid", "same"):
        for stride, dilation in ((1, 1), (2, 1), (1, 2), (3, 1)):
            for size in (2, 3):
                yield (
                    f"conv2d-{padding}-s{stride}-d{dilation}-k{size}",
                    lambda p=padding, s=stride, d=dilation, k=size: on(
                        L.Conv2D(4, (k, k + 1), strides=s, dilation_rate=d, padding=p, activation="relu")
                    ),
                )
        for stride in (1, 2, 3):
            for size in (2, 3, 4, 5):
                yield (
                    f"conv2dtranspose-{padding}-s{stride}-k{size}",
                    lambda p=padding, s=stride, k=size: on(L.Conv2DTranspose(4, k, strides=s, padding=p)),
                )
        yield (
            f"conv2dtranspose-{padding}-output-padding",
            lambda p=padding: on(L.Conv2DTranspose(4, 3, strides=2, padding=p, output_padding=1)),
        )
        for kind in ("Max", "Average"):
            for window, stride in ((2, 2), (3, 2), (3, 1), (2, 3)):
                yield (
                    f"{kind}pool-{padding}-k{window}-s{stride}".lower(),
                    lambda p=padding, c=kind, w=window, s=stride: on(getattr(L, f"{c}Pooling2D")(w, s, p)),
                )
            yield (
                f"{kind}pool1d-{padding}".lower(),
                lambda p=padding, c=kind: on(getattr(L, f"{c}Pooling1D")(3, 2, p), sequence()),
            )
            yield (
                f"{kind}pool3d-{padding}".lower(),
                lambda p=padding, c=kind: on(getattr(L, f"{c}Pooling3D")(2, 2, p), image(5, 4, 3, 2)),
            )
        for stride, size, multiplier in ((1, 3, 1), (2, 3, 2), (2, 4, 3)):
            yield (
                f"depthwise-{padding}-s{stride}-k{size}-m{multiplier}",
                lambda p=padding, s=stride, k=size, m=multiplier: on(
                    L.DepthwiseConv2D(k, strides=s, padding=p, depth_multiplier=m, activation="silu")
                ),
            )
        yield (
            f"separable-{padding}",
            lambda p=padding: on(L.SeparableConv2D(5, 3, strides=2, padding=p, depth_multiplier=2)),
        )
        yield f"separable1d-{padding}", lambda p=padding: on(L.SeparableConv1D(5, 3, padding=p), sequence())
        yield f"depthwise1d-{padding}", lambda p=padding: on(L.DepthwiseConv1D(3, padding=p), sequence())
        yield (
            f"conv3d-{padding}",
            lambda p=padding: on(L.Conv3D(3, (2, 3, 1), strides=(1, 2, 1), padding=p), image(5, 4, 3, 2)),
        )
        yield (
            f"conv3dtranspose-{padding}",
            lambda p=padding: on(
                L.Conv3DTranspose(3, (2, 3, 1), strides=(1, 2, 1), padding=p), image(5, 4, 3, 2)
            ),
        )
        yield (
            f"conv1dtranspose-{padding}",
            lambda p=padding: on(L.Conv1DTranspose(5, 4, strides=3, padding=p), sequence()),
        )
    for dilation in (1, 2):
        yield (
            f"conv1d-causal-d{dilation}",
            lambda d=dilation: on(L.Conv1D(5, 3, padding="causal", dilation_rate=d), sequence()),
        )
    yield "conv1d-causal-strided", lambda: on(L.Conv1D(5, 3, padding="causal", strides=2), sequence())
    yield "conv2d-groups", lambda: on(L.Conv2D(6, 3, groups=2, padding="same"), image(6, 5, 4))
    yield "conv2d-bare", lambda: on(L.Conv2D(4, 3, use_bias=False))
    yield "conv2d-even", lambda: on(L.Conv2D(4, 4, padding="same", strides=2))
    yield (
        "pool-channels-first",
        lambda: on(L.GlobalAveragePooling2D("channels_first", keepdims=True), image(3, 8, 9)),
    )


def _positions():
    for dims, shape in ((1, (7, 4)), (2, (6, 5, 3)), (3, (4, 5, 3, 2))):
        for kind in ("Max", "Average"):
            for keep in (False, True):
                yield (
                    f"global-{kind}-{dims}d-{keep}".lower(),
                    lambda c=kind, n=dims, s=shape, k=keep: on(
                        getattr(L, f"Global{c}Pooling{n}D")(keepdims=k), image(*s)
                    ),
                )
            yield (
                f"adaptive-{kind}-{dims}d".lower(),
                lambda c=kind, n=dims, s=shape: on(getattr(L, f"Adaptive{c}Pooling{n}D")(3), image(*s)),
            )
    yield "pad1d", lambda: on(L.ZeroPadding1D((1, 2)), sequence())
    yield "pad2d", lambda: on(L.ZeroPadding2D(((0, 1), (2, 3))))
    yield "pad3d", lambda: on(L.ZeroPadding3D(((0, 1), (2, 3), (1, 1))), image(4, 5, 3, 2))
    yield "crop1d", lambda: on(L.Cropping1D((1, 2)), sequence())
    yield "crop2d", lambda: on(L.Cropping2D(((0, 1), (2, 3))))
    yield "crop3d", lambda: on(L.Cropping3D(((0, 1), (2, 1), (1, 1))), image(4, 5, 3, 2))
    yield "upsample1d", lambda: on(L.UpSampling1D(3), sequence())
    yield "upsample3d", lambda: on(L.UpSampling3D((2, 3, 1)), image(4, 5, 3, 2))
    for interpolation in ("nearest", "bilinear", "bicubic", "lanczos3", "lanczos5"):
        yield (
            f"upsample2d-{interpolation}",
            lambda i=interpolation: on(L.UpSampling2D((2, 3), interpolation=i)),
        )
        yield f"resize-{interpolation}-up", lambda i=interpolation: on(L.Resizing(13, 11, interpolation=i))
    for interpolation in ("nearest", "bilinear", "lanczos3"):
        yield f"resize-{interpolation}-down", lambda i=interpolation: on(L.Resizing(5, 6, interpolation=i))
    for interpolation in ("bilinear", "bicubic", "lanczos3", "lanczos5"):
        yield (
            f"resize-{interpolation}-antialias",
            lambda i=interpolation: on(L.Resizing(5, 6, interpolation=i, antialias=True)),
        )
    yield "flatten", lambda: on(L.Flatten())
    yield "flatten-channels-first", lambda: on(L.Flatten(data_format="channels_first"))
    yield "reshape", lambda: on(L.Reshape((4, -1)))
    yield "permute", lambda: on(L.Permute((2, 3, 1)))
    yield "repeat-vector", lambda: on(L.RepeatVector(3), keras.Input((4,)))


def _norms():
    yield "batchnorm", lambda: on(L.BatchNormalization())
    yield "batchnorm-eps", lambda: on(L.BatchNormalization(epsilon=1.001e-5, momentum=0.9, scale=False))
    yield "batchnorm-axis1", lambda: on(L.BatchNormalization(axis=1, center=False))
    yield "batchnorm-masked", lambda: masked(L.BatchNormalization())
    yield "batchnorm-2d", lambda: on(L.BatchNormalization(), keras.Input((4,)))
    yield "layernorm", lambda: on(L.LayerNormalization())
    yield "layernorm-axes", lambda: on(L.LayerNormalization(axis=(1, 2), epsilon=1e-6))
    yield "layernorm-bare", lambda: on(L.LayerNormalization(center=False, scale=False))
    yield "layernorm-center", lambda: on(L.LayerNormalization(scale=False))
    yield "groupnorm", lambda: on(L.GroupNormalization(2), image(6, 5, 4))
    yield "groupnorm-instance", lambda: on(L.GroupNormalization(-1), image(6, 5, 4))
    yield "groupnorm-bare", lambda: on(L.GroupNormalization(2, center=False, scale=False), image(6, 5, 4))
    yield "rmsnorm", lambda: on(L.RMSNormalization())
    yield "unitnorm", lambda: on(L.UnitNormalization())
    yield "unitnorm-axis", lambda: on(L.UnitNormalization(axis=1))
    yield "normalization", lambda: on(L.Normalization(mean=[0.1, 0.2, 0.3], variance=[1.0, 2.0, 3.0]))
    yield "normalization-invert", lambda: on(L.Normalization(mean=0.5, variance=2.0, invert=True))
    yield "rescaling", lambda: on(L.Rescaling(1 / 127.5, offset=-1.0))
    yield "rescaling-list", lambda: on(L.Rescaling([1.0, 2.0, 0.3], offset=[0.1, 0.2, 0.3]))


def _recurrent():
    kinds = {
        "lstm": L.LSTM,
        "gru": L.GRU,
        "gru-before": lambda *a, **k: L.GRU(*a, reset_after=False, **k),
        "rnn": L.SimpleRNN,
    }
    for name, cls in kinds.items():
        for sequences in (False, True):
            yield (
                f"{name}-{sequences}".lower(),
                lambda c=cls, r=sequences: on(c(5, return_sequences=r), sequence()),
            )
            yield (
                f"{name}-{sequences}-masked".lower(),
                lambda c=cls, r=sequences: masked(c(5, return_sequences=r)),
            )
            yield (
                f"{name}-{sequences}-backwards-masked".lower(),
                lambda c=cls, r=sequences: masked(c(5, return_sequences=r, go_backwards=True)),
            )
        yield f"{name}-bare", lambda c=cls: on(c(5, use_bias=False), sequence())
        yield f"{name}-bare-masked", lambda c=cls: masked(c(5, use_bias=False))
        yield f"{name}-activations", lambda c=cls: on(c(5, activation="relu"), sequence())
        yield (
            f"{name}-zero-output",
            lambda c=cls: masked(c(5, return_sequences=True, zero_output_for_mask=True)),
        )
        yield f"{name}-states", lambda c=cls: _handed_on(c)
        yield f"{name}-dropout", lambda c=cls: on(c(5, dropout=0.2, recurrent_dropout=0.3), sequence())
        for mode in ("concat", "sum", "ave", "mul"):
            yield (
                f"bidirectional-{name}-{mode}",
                lambda c=cls, m=mode: on(
                    L.Bidirectional(c(5, return_sequences=True), merge_mode=m), sequence()
                ),
            )
        yield f"bidirectional-{name}-last", lambda c=cls: on(L.Bidirectional(c(5)), sequence())
        yield (
            f"bidirectional-{name}-masked",
            lambda c=cls: masked(L.Bidirectional(c(5, return_sequences=True))),
        )
        yield f"bidirectional-{name}-last-masked", lambda c=cls: masked(L.Bidirectional(c(5)))
        yield (
            f"bidirectional-{name}-both",
            lambda c=cls: on(L.Bidirectional(c(5), merge_mode=None), sequence()),
        )
        yield (
            f"bidirectional-{name}-states",
            lambda c=cls: on(L.Bidirectional(c(5, return_state=True)), sequence()),
        )
    for cell in (L.LSTMCell, L.GRUCell, L.SimpleRNNCell):
        yield (
            f"rnn-over-{cell.__name__}".lower(),
            lambda c=cell: on(L.RNN(c(5), return_sequences=True), sequence()),
        )
    stacked = [lambda: L.LSTMCell(5), lambda: L.GRUCell(4), lambda: L.SimpleRNNCell(3)]
    yield "rnn-stacked", lambda: on(L.RNN([make() for make in stacked], return_state=True), sequence())
    yield (
        "rnn-stacked-masked",
        lambda: masked(L.RNN([make() for make in stacked], return_sequences=True, go_backwards=True)),
    )
    frames = (4, 6, 5, 2)
    yield "convlstm", lambda: on(L.ConvLSTM2D(3, 3, padding="same", return_sequences=True), image(*frames))
    yield (
        "convlstm-strided",
        lambda: on(L.ConvLSTM2D(3, (3, 2), strides=2, return_state=True), image(*frames)),
    )
    yield "convlstm1d", lambda: on(L.ConvLSTM1D(3, 3, padding="same", go_backwards=True), image(4, 6, 2))
    yield "convlstm3d", lambda: on(L.ConvLSTM3D(2, 2, padding="same"), image(3, 4, 3, 3, 2))
    yield "time-distributed-dense", lambda: on(L.TimeDistributed(L.Dense(3, activation="tanh")), sequence())
    yield (
        "time-distributed-conv",
        lambda: on(L.TimeDistributed(L.Conv2D(3, 3, padding="same")), image(*frames)),
    )
    yield "time-distributed-masked", lambda: masked(lambda x: L.GRU(3)(L.TimeDistributed(L.Dense(3))(x)))
    yield "time-distributed-model", lambda: on(L.TimeDistributed(_little()), image(*frames))
    yield "masking", _masking


def _masking():
    x = sequence()
    return keras.Model(x, L.LSTM(5)(L.Masking()(L.ReLU(threshold=0.8)(x))))


def _little():
    return keras.Sequential([keras.Input((6, 5, 2)), L.Conv2D(3, 3), L.Flatten(), L.Dense(2)], name="little")


def _handed_on(cls):
    """Encoder and decoder: states out of one layer into the next."""
    x, y = sequence(), keras.Input((4, 4), name="target")
    _, *states = cls(5, return_state=True)(x)
    return keras.Model([x, y], cls(5, return_sequences=True)(y, initial_state=states))


def _attention():
    def attend(layer, *, mask=False, value_width=4, **call):
        query = keras.Input((6, 4), name="query")
        value = keras.Input((7, value_width), name="value")
        key = keras.Input((7, value_width), name="key")
        mask = (
            {"attention_mask": K.greater(K.matmul(query, K.transpose(value, (0, 2, 1))), -1.0)}
            if mask
            else {}
        )
        return keras.Model([query, value, key], layer(query, value, key, **mask, **call))

    yield "mha", lambda: attend(L.MultiHeadAttention(2, 3))
    yield "mha-widths", lambda: attend(L.MultiHeadAttention(3, 5, value_dim=2, output_shape=6), value_width=5)
    yield "mha-bare", lambda: attend(L.MultiHeadAttention(2, 4, use_bias=False))
    yield "mha-mask", lambda: attend(L.MultiHeadAttention(2, 3), mask=True)
    yield "mha-causal", lambda: attend(L.MultiHeadAttention(2, 3), use_causal_mask=True)
    yield (
        "mha-scores",
        lambda: attend(
            L.MultiHeadAttention(2, 3, dropout=0.1), return_attention_scores=True, use_causal_mask=True
        ),
    )
    gated = {"use_gate": True, "sliding_window": 2}  # of newer versions of Keras
    if "use_gate" in inspect.signature(L.MultiHeadAttention).parameters:
        yield "mha-gate-window", lambda: attend(L.MultiHeadAttention(2, 3, value_dim=2, **gated))
        yield "gqa-gate-window", lambda: attend(L.GroupQueryAttention(3, 4, 2, **gated), use_causal_mask=True)
    yield "mha-self-masked", lambda: masked(lambda x: L.MultiHeadAttention(2, 3)(x, x))
    yield "gqa", lambda: attend(L.GroupQueryAttention(3, 4, 2))
    yield "gqa-mask", lambda: attend(L.GroupQueryAttention(3, 4, 2), mask=True)
    yield (
        "gqa-causal-masked",
        lambda: masked(lambda x: L.GroupQueryAttention(3, 4, 2)(x, x, use_causal_mask=True)),
    )
    yield "attention", lambda: masked(lambda x: L.Attention(use_scale=True)([x, x]))
    yield "attention-causal", lambda: masked(lambda x: L.Attention()([x, x], use_causal_mask=True))
    yield (
        "attention-concat",
        lambda: masked(lambda x: L.Attention(score_mode="concat", use_scale=True)([x, x])),
    )
    yield "attention-concat-bare", lambda: masked(lambda x: L.Attention(score_mode="concat")([x, x]))
    yield (
        "attention-additive",
        lambda: masked(lambda x: L.AdditiveAttention()([x, x], return_attention_scores=True)),
    )
    yield "attention-additive-bare", lambda: masked(lambda x: L.AdditiveAttention(use_scale=False)([x, x]))


def _activations():
    from isobatch_keras.spec.activations import FUNCTIONS

    for function in FUNCTIONS:
        name = function.__name__
        yield f"activation-{name}", lambda f=function: on(L.Activation(f), sequence())
        yield f"dense-{name}", lambda f=function: on(L.Dense(6, activation=f), sequence())
    yield "relu", lambda: on(L.ReLU())
    yield "relu6", lambda: on(L.ReLU(6.0))
    yield "relu-all", lambda: on(L.ReLU(1.5, negative_slope=0.25, threshold=0.5))
    yield "leakyrelu", lambda: on(L.LeakyReLU())
    yield "prelu", lambda: on(L.PReLU(shared_axes=[1, 2]))
    yield "prelu-full", lambda: on(L.PReLU())
    yield "elu", lambda: on(L.ELU(0.7))
    yield "softmax-axes", lambda: on(L.Softmax(axis=(1, 2)))
    yield (
        "softmax-masked",
        lambda: masked(lambda x: L.Softmax(axis=1)(L.Dense(1)(x)[..., 0], mask=x[..., 0] > 0)),
    )
    yield "activation-layer", lambda: on(L.Dense(5, activation=L.LeakyReLU(0.25)))
    for layer in (
        L.Dropout(0.3),
        L.Dropout(0.3, noise_shape=(None, 1, 1, 3)),
        L.SpatialDropout2D(0.3),
        L.GaussianNoise(0.3),
        L.GaussianDropout(0.3),
        L.AlphaDropout(0.3),
        L.ActivityRegularization(0.1),
        L.Identity(),
    ):
        yield f"noise-{layer.name}", lambda one=layer: on(one)


def _dense():
    yield "dense-bare", lambda: on(L.Dense(5, use_bias=False))
    yield "einsum-dense", lambda: on(L.EinsumDense("abc,cde->abde", (None, 3, 2), bias_axes="de"), sequence())
    yield (
        "einsum-dense-ellipsis",
        lambda: on(L.EinsumDense("...x,xy->...y", 5, bias_axes="y", activation="relu")),
    )
    yield "embedding", lambda: on(L.Embedding(11, 4), keras.Input((7,), dtype="int32"))
    yield "one-hot", lambda: on(L.CategoryEncoding(10, output_mode="one_hot"), keras.Input((), dtype="int32"))
    yield (
        "multi-hot",
        lambda: on(L.CategoryEncoding(10, output_mode="multi_hot"), keras.Input((4,), dtype="int32")),
    )
    yield "count", lambda: on(L.CategoryEncoding(10, output_mode="count"), keras.Input((4,), dtype="int32"))
    yield "discretization", lambda: on(L.Discretization([-0.5, 0.0, 0.7]), sequence())


def _merging():
    def merge(layer, shapes=((6, 5), (6, 5), (6, 5))):
        inputs = [keras.Input(shape, name=f"in{number}") for number, shape in enumerate(shapes)]
        return keras.Model(inputs, layer(inputs))

    for cls in (L.Add, L.Multiply, L.Maximum, L.Minimum, L.Average, L.Concatenate):
        yield f"merge-{cls.__name__}".lower(), lambda c=cls: merge(c())
    for cls in (L.Add, L.Multiply, L.Maximum, L.Minimum, L.Average, L.Concatenate):
        yield f"merge-{cls.__name__}-masked".lower(), lambda c=cls: _merged_words(c())
    yield "merge-multiply-half-masked", lambda: masked(lambda x: L.Multiply()([x, x[:, ::-1] + 1.0, x]))
    yield "merge-maximum-half-masked", lambda: masked(lambda x: L.Maximum()([x[:, ::-1], x, x]))
    yield "merge-subtract", lambda: merge(L.Subtract(), ((6, 5), (6, 5)))
    yield "merge-broadcast", lambda: merge(L.Multiply(), ((6, 5), (6, 1), (1, 5)))
    yield "merge-ranks", lambda: merge(L.Add(), ((6, 5), (5,)))
    yield "concatenate-axis", lambda: merge(L.Concatenate(axis=1), ((6, 5), (3, 5)))
    yield "dot", lambda: merge(L.Dot(axes=(2, 1)), ((6, 5), (5, 3)))
    yield "dot-vectors", lambda: merge(L.Dot(axes=1, normalize=True), ((6,), (6,)))
    yield "dot-middle", lambda: merge(L.Dot(axes=1), ((6, 5), (6, 3)))


def _merged_words(layer):
    """Three sequences masked in other places, and what a later layer makes of the mask."""
    words = [keras.Input((7,), dtype="int32", name=f"words{number}") for number in range(3)]
    turned = [words[0], K.flip(words[1], 1), K.roll(words[2], 2, 1)]
    merged = layer([L.Embedding(11, 4, mask_zero=True)(one) for one in turned])
    return keras.Model(words, [merged, L.LSTM(3)(merged)])


def _functions():
    def of(function, *shape):
        x = keras.Input(shape or (6, 5), name="x")
        return keras.Model(x, function(x))

    cases = {
        "arithmetic": lambda x: (x + 3.0) * (1 / 6) - x / 2 + 2**x - (1.0 - x) * -x,
        "reverse": lambda x: 1.0 / (x * x + 2) + 3.0 - x,
        "integer-division": lambda x: x // 0.7 + x % 0.3,
        "power": lambda x: K.abs(x) ** 1.5,
        "compare": lambda x: K.where(x > 0, x, K.exp(x)),
        "logic": lambda x: K.where(K.logical_and(x > 0, K.logical_not(x < 1)), x, 0.0),
        "unary": lambda x: (
            K.sin(x) + K.cos(x) + K.log1p(K.abs(x)) + K.sqrt(K.square(x) + 1) + K.sign(x) + K.erf(x)
        ),
        "rounding": lambda x: K.floor(x) + 2 * K.ceil(x) + K.round(x * 3) + K.round(x, 1),
        "sorted": lambda x: [K.sort(x, axis=1), K.argsort(x), *K.top_k(x, 3)],
        "integers": lambda x: [
            K.sum(K.cast(x > 0, "int32"), -1),
            K.cumsum(K.cast(x, "int32"), 1),
            K.sum(x > 0, 1),
        ],
        "filled": lambda x: K.logical_or(x > 0, K.zeros_like(x, dtype="bool")),
        "reductions": lambda x: [
            K.mean(x, axis=-1),
            K.sum(x, axis=(1, 2)),
            K.max(x, axis=1, keepdims=True),
            K.min(x, axis=-1),
            K.prod(x, axis=1),
            K.std(x, axis=-1),
            K.var(x, axis=1),
            K.logsumexp(x, axis=-1),
        ],
        "indices": lambda x: [K.argmax(x, axis=-1), K.argmin(x, axis=1)],
        "any": lambda x: K.cast(K.any(x > 0.9, axis=-1), "float32"),
        "slices": lambda x: [x[:, 1:3], x[:, -1], x[..., ::2], x[:, None, :, 0], x[:, ::-1], x[:, 4:1:-2]],
        "shapes": lambda x: [
            K.transpose(x, (0, 2, 1)),
            K.expand_dims(x, 1),
            K.squeeze(K.expand_dims(x, 2), 2),
            K.reshape(x, (-1, 30)),
            K.swapaxes(x, 1, 2),
            K.moveaxis(x, 1, 2),
            K.repeat(x, 2, axis=1),
            K.tile(x, (1, 2, 1)),
            K.flip(x, axis=1),
            K.roll(x, 2, axis=1),
        ],
        "split": lambda x: K.split(x, 2, axis=1),
        "split-at": lambda x: K.split(x, [1, 4], axis=1),
        "joined": lambda x: [K.concatenate([x, x + 1], axis=1), K.stack([x, x + 1], axis=1)],
        "matmul": lambda x: K.matmul(x, K.transpose(x, (0, 2, 1))),
        "einsum": lambda x: K.einsum("bij,bkj->bik", x, x),
        "clip": lambda x: K.clip(x, -0.5, 0.75),
        "pad": lambda x: [
            K.pad(x, ((0, 0), (1, 2), (0, 0)), m) for m in ("constant", "reflect", "symmetric")
        ],
        "cumulative": lambda x: [K.cumsum(x, axis=1), K.cumprod(x, axis=1)],
        "one-hot": lambda x: K.one_hot(K.argmax(x, axis=-1), 5),
        "take": lambda x: K.take(x, np.array([2, 0, -1]), axis=1),
        "constant": lambda x: x * np.linspace(0.1, 1, 5, dtype="float32") + np.ones((6, 1), "float32"),
        "softmax": lambda x: [K.softmax(x, axis=1), K.log_softmax(x)],
        "nn": lambda x: (
            K.gelu(x) + K.gelu(x, approximate=False) + K.leaky_relu(x, 0.1) + K.elu(x, 0.5) + K.silu(x)
        ),
        "normalize": lambda x: K.normalize(x, axis=1),
        "cast": lambda x: K.cast(K.cast(x * 3, "int32"), "float32") + x,
        "extremes": lambda x: K.maximum(x, 0.1) + K.minimum(x, K.zeros_like(x)) + K.ones_like(x),
    }
    for name, function in cases.items():
        yield f"ops-{name}", lambda f=function: of(f)
    yield "ops-pool", lambda: of(lambda x: [K.max_pool(x, 2, 2), K.average_pool(x, 3, 2, "same")], 7, 6, 3)


CASES = {
    name: make
    for part in (
        _convolutions,
        _positions,
        _norms,
        _recurrent,
        _attention,
        _activations,
        _dense,
        _merging,
        _functions,
    )
    for name, make in part()
}
