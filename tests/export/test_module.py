"""`to_module`: what stands in for a model is one of its class, with its names, its signature and its state."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from loops import HOST, Classifier, assert_same_state, batches, captured, classifier, module_of, placement_of, twin
from small_models import CASES

from rlplace.errors import CaptureError, InvalidValue
from rlplace.export import PlacedModule, to_module
from rlplace.export.module import hf_device_map
from rlplace.graphs import capture


def test_it_is_one_of_its_model_with_the_same_names() -> None:
    model = classifier()
    module, eager = module_of(model), twin(model)
    assert isinstance(module, Classifier)
    assert isinstance(module, PlacedModule)
    assert list(module.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in module.named_modules()] == [name for name, _ in eager.named_modules()]
    other = twin(eager)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    module.load_state_dict(other.state_dict())
    ((x, _),) = batches(1)
    torch.testing.assert_close(module(x), other(x))
    eager.load_state_dict(module.state_dict())
    module.load_state_dict(twin(eager).state_dict(), assign=True)
    assert_same_state(module.state_dict(), eager.state_dict())
    module.eval()
    eager.eval()
    torch.testing.assert_close(module(x), eager(x))
    module.close()


def test_what_cannot_be_a_module_is_told() -> None:
    case = CASES["input_changed"]()
    module = module_of(case.model, capture(case.model, case.inputs, case.loss_fn))
    with pytest.raises(CaptureError, match="`forward` writes to input_1, expected inputs that stay as they are"):
        module(*case.inputs)
    with pytest.raises(InvalidValue, match="Take the original model"):
        copy.deepcopy(module)
    module.close()
    model = classifier()
    graph = captured(model, "sgd")
    with pytest.raises(InvalidValue, match="the model that the graph was captured from"):
        to_module(twin(model), graph, placement_of(graph), host=HOST)


def test_its_forward_has_the_signature_of_its_models() -> None:
    """By which Hugging Face's Trainer picks the columns of a batch."""
    model = classifier()
    module = module_of(model)
    assert inspect.signature(module.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(module).forward) == inspect.signature(type(model).forward)
    module.close()


def test_where_parameters_are_is_told_to_hugging_face_where_they_are_apart() -> None:
    model = classifier()
    module = module_of(model)
    assert not hasattr(module, "hf_device_map"), "cores are one device"
    module.close()
    places = {"up.weight": torch.device("cuda", 1), "down.weight": torch.device("cpu")}
    assert hf_device_map(places) == {"up.weight": 1, "down.weight": "cpu"}
