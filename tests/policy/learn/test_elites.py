import numpy as np
import pytest

from rlplace.policy import Elites


def test_the_best_are_kept_in_order():
    elites = Elites(capacity=2)
    elites.add(np.array([[0, 0], [0, 1]]), np.array([-3.0, -1.0]))
    elites.add(np.array([[1, 1]]), np.array([-2.0]))
    assert elites.group_devices.tolist() == [[0, 1], [1, 1]]
    assert elites.rewards.tolist() == [-1.0, -2.0]
    assert len(elites) == 2


def test_a_placement_that_comes_again_counts_with_its_mean():
    elites = Elites(capacity=2)
    elites.add(np.array([[0, 1], [1, 1]]), np.array([-1.0, -2.0]))  # a lucky answer
    elites.add(np.array([[0, 1], [0, 1]]), np.array([-4.0, -4.0]))
    assert elites.group_devices.tolist() == [[1, 1], [0, 1]]
    assert elites.rewards.tolist() == pytest.approx([-2.0, -3.0])


def test_equal_answers_leave_the_mean_as_it_was_to_the_bit():
    elites = Elites(capacity=1)
    for _ in range(50):
        elites.add(np.array([[1]]), np.array([-0.1]))
    assert elites.rewards.tolist() == [-0.1]


def test_of_equals_the_earlier_stays():
    elites = Elites(capacity=1)
    elites.add(np.array([[0], [1]]), np.array([-1.0, -1.0]))
    assert elites.group_devices.tolist() == [[0]]


def test_clearing_forgets():
    elites = Elites(capacity=1)
    elites.add(np.array([[0]]), np.array([5.0]))
    elites.clear()
    elites.add(np.array([[1]]), np.array([-5.0]))
    assert elites.group_devices.tolist() == [[1]]
