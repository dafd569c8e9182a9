"""Products of matrices give the dtype they are given, and on a CPU sum in float32."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sd_tpu.models import factors, layers, products
from sd_tpu.models.transformer_blocks import GELU, FeedForward


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_rounded_once(dtype):
    """In bfloat16 256 + 1 is 256, however often 1 is added."""
    a = jnp.ones((2, 3, 65), dtype).at[..., 0].set(256)
    product = products.matmul(a, jnp.ones((65, 4), dtype))
    assert product.dtype == dtype
    np.testing.assert_array_equal(product, jnp.full((2, 3, 4), 320, dtype))


@pytest.mark.parametrize(("platform", "summed"), [("cpu", "float32"), ("tpu", "bfloat16")])
def test_layers_multiply_as_suits_the_platform(monkeypatch, platform, summed):
    monkeypatch.setattr(products, "platform", lambda: platform)
    settings = dict(dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for layer, x in (
        (layers.linear(4, 5, **settings), (2, 4)),
        (layers.pointwise(4, 5, **settings), (1, 2, 2, 4)),
    ):
        traced = jax.make_jaxpr(layer)(jnp.ones(x, jnp.bfloat16))
        (product,) = [each for each in traced.eqns if each.primitive.name == "dot_general"]
        assert product.outvars[0].aval.dtype == summed
        assert traced.out_avals[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("platform", "rows", "taken"),
    [("cpu", 12, 4), ("cpu", 4, 4), ("cpu", 2, 2), ("cpu", 13, 13), ("tpu", 12, 12)],
)
def test_a_layer_is_given_few_rows_of_what_is_large_on_a_cpu(monkeypatch, platform, rows, taken):
    monkeypatch.setattr(products, "platform", lambda: platform)
    monkeypatch.setattr(products, "ROWS", 4)
    monkeypatch.setattr(products, "LARGE", 8)
    given = []

    def layer(x):
        given.append(x.size // 2)
        return jnp.concatenate([2 * x, x + 1], axis=-1)

    x = jnp.arange(2.0 * rows).reshape(1, rows, 2)
    made = products.by_rows(layer, x)
    np.testing.assert_array_equal(made, jnp.concatenate([2 * x, x + 1], axis=-1))
    assert given[-1] == taken


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_pictures_with_factors_of_their_own_are_told_apart(monkeypatch, platform):
    """In layers that take few rows at a time on CPUs, and in products that take all on TPUs."""
    monkeypatch.setattr(factors, "platform", lambda: platform)
    monkeypatch.setattr(products, "ROWS", 4)
    monkeypatch.setattr(products, "LARGE", 8)
    network = nnx.eval_shape(lambda: FeedForward(8, GELU, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    shapes = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda leaf: jnp.asarray(draw(leaf.shape)), shapes)
    adapted = factors.adapt(network, lambda name: True)
    assert adapted.keys() == {"net.0.proj", "net.2"}
    of_one = factors.factor_shapes(adapted, 16, jnp.float32)
    own = jax.tree.map(lambda leaf: jnp.asarray(draw((2, *leaf.shape))), of_one)
    graph, x = nnx.graphdef(network), jnp.asarray(draw((2, 6, 8)))

    @jax.jit
    def fed(x, own):
        return nnx.merge(graph, factors.applied(params, adapted, own))(x)

    together = fed(x, own)
    first, second = (jax.tree.map(operator.itemgetter(number), own) for number in range(2))
    for number, its in enumerate((first, second)):  # shared by all rows, as training has them
        alone = fed(x[number][None], its)
        np.testing.assert_allclose(together[number], alone[0], rtol=1e-4, atol=1e-4)
    # Bytes do not depend on the neighbour, nor on which of the two it is.
    turned = jax.tree.map(lambda *leaves: jnp.stack(leaves), second, first)
    np.testing.assert_array_equal(fed(x[::-1], turned), together[::-1])
    other = jax.tree.map(lambda one: jnp.stack([one, 100 * one]), first)
    np.testing.assert_array_equal(fed(x, other)[0], together[0])
