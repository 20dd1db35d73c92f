"""Every layer that a twin knows: the twin agrees with Keras in float64, layer by layer and as a whole."""

import pytest
from twin_cases import CASES, batch_for, scramble

import isobatch
from isobatch.verdict import judge


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twin_of_layer_agrees(name):
    model = scramble(CASES[name]())
    verdict = judge(model, isobatch.twin(model), batch_for(model), precision=None)
    assert verdict.passed, str(verdict)
