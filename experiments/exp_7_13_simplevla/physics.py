"""The table-top in MuJoCo: a gripper on three slides, two blocks, real contacts; many episodes advance in one call.

Shape suffixes: _N episodes, _S numbers of a physical state, _L control steps of a call, _A numbers of an action.
Lengths are metres. An action of a control step is (dx, dy, dz) and the gripper's wish (0 open, 1 closed); the gripper's
target moves by the first three from where the gripper is, evenly over the control period.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

TIMESTEP, SUBSTEPS = 0.005, 12
RAMP = 0.6
PERIOD = TIMESTEP * SUBSTEPS  # seconds of a control step
HALF = 0.02  # of a block's edge
SHAPES = {  # MuJoCo geom type, half sizes
    "cube": ("box", (HALF, HALF, HALF)),
    "small": ("box", (0.015, 0.015, 0.015)),
    "cylinder": ("cylinder", (HALF, HALF)),
    "tall": ("box", (0.015, 0.02, 0.03)),
}
BLOCKS = 2
REACH = 0.24  # of the gripper, from the middle of the table
LOW, HIGH, START = 0.02, 0.2, 0.12  # of the finger tips' middle
FINGER_OPEN = 0.04

SCENE = """
<mujoco>
  <option timestep="{timestep}" integrator="implicitfast" cone="pyramidal"/>
  <default><geom solref="0.008 1" condim="3" friction="1 0.02 0.001"/></default>
  <worldbody>
    <geom name="table" type="plane" size="1 1 0.1" friction="0.6 0.02 0.001"/>
    <body name="hand" pos="0 0 0" gravcomp="1">
      <joint name="x" type="slide" axis="1 0 0" armature="0.05"/>
      <joint name="y" type="slide" axis="0 1 0" armature="0.05"/>
      <joint name="z" type="slide" axis="0 0 1" armature="0.05"/>
      <geom type="box" size="0.05 0.015 0.01" pos="0 0 0.06" mass="0.2" contype="0" conaffinity="0"/>
      <body name="left" gravcomp="1">
        <joint name="fl" type="slide" axis="1 0 0" range="-0.045 0" limited="true" armature="0.02" damping="1"/>
        <geom type="box" size="0.005 0.012 0.025" pos="-0.005 0 0.01" mass="0.05" condim="4"/>
      </body>
      <body name="right" gravcomp="1">
        <joint name="fr" type="slide" axis="1 0 0" range="0 0.045" limited="true" armature="0.02" damping="1"/>
        <geom type="box" size="0.005 0.012 0.025" pos="0.005 0 0.01" mass="0.05" condim="4"/>
      </body>
    </body>
{blocks}
  </worldbody>
  <actuator>
    <position joint="x" kp="5000" dampratio="1"/>
    <position joint="y" kp="5000" dampratio="1"/>
    <position joint="z" kp="5000" dampratio="1"/>
    <position joint="fl" kp="150" kv="4" forcerange="-6 6"/>
    <position joint="fr" kp="150" kv="4" forcerange="-6 6"/>
  </actuator>
</mujoco>
"""
BLOCK = """    <body name="block{index}" pos="{index} 0 {height}">
      <freejoint/><geom type="{kind}" size="{size}" mass="0.06"/>
    </body>"""


class Snapshot(NamedTuple):
    """What is where: gripper (..., 3), finger opening (...), blocks (..., BLOCKS, 3) and their speed (..., BLOCKS)."""

    hand: np.ndarray
    opening: np.ndarray
    blocks: np.ndarray
    speed: np.ndarray


def rest_height(shape: str) -> float:
    """Height of a block's centre when it stands on the table."""
    return SHAPES[shape][1][-1]


class Physics:
    """The scene with blocks of one shape."""

    def __init__(self, shape: str) -> None:
        import mujoco  # a second to load, which the making of reports does without
        from mujoco import rollout

        size = " ".join(map(str, SHAPES[shape][1]))
        blocks = [BLOCK.format(index=i, height=rest_height(shape), kind=SHAPES[shape][0], size=size) for i in range(BLOCKS)]
        self.shape, self.rollout, self.engine = shape, rollout.rollout, mujoco
        self.model = mujoco.MjModel.from_xml_string(SCENE.format(timestep=TIMESTEP, blocks="\n".join(blocks)))
        self.data = mujoco.MjData(self.model)
        self.nq, self.nv = self.model.nq, self.model.nv
        if mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_FULLPHYSICS) != 1 + self.nq + self.nv:
            raise RuntimeError("MuJoCo's full state is laid out otherwise than (time, qpos, qvel).")

    def start(self, block_xy: np.ndarray) -> np.ndarray:
        """States (N, S) with the blocks' centres at (N, BLOCKS, 2), the gripper open above the middle."""
        count = len(block_xy)
        state_NS = np.zeros((count, 1 + self.nq + self.nv))
        state_NS[:, 3] = START
        state_NS[:, 4:6] = -FINGER_OPEN, FINGER_OPEN
        for index in range(BLOCKS):
            at = 6 + 7 * index
            state_NS[:, at : at + 2] = block_xy[:, index]
            state_NS[:, at + 2 : at + 4] = rest_height(self.shape), 1.0
        return state_NS

    def read(self, state_S: np.ndarray) -> Snapshot:
        """What states (..., S) say."""
        places = [6 + 7 * index for index in range(BLOCKS)]
        speeds = [1 + self.nq + 5 + 6 * index for index in range(BLOCKS)]
        blocks = np.stack([state_S[..., at : at + 3] for at in places], -2)
        speed = np.stack([np.linalg.norm(state_S[..., at : at + 3], axis=-1) for at in speeds], -1)
        return Snapshot(state_S[..., 1:4], state_S[..., 5] - state_S[..., 4], blocks, speed)

    def advance(self, state_NS: np.ndarray, action_NLA: np.ndarray) -> np.ndarray:
        """States after each of L control steps, (N, L, S), for actions (N, L, 4)."""
        count, steps = action_NLA.shape[:2]
        limits = np.array([[-REACH, -REACH, LOW], [REACH, REACH, HIGH]])
        target = state_NS[:, 1:4].clip(*limits)
        control = np.empty((count, steps * SUBSTEPS, 5))
        share = np.linspace(1 / SUBSTEPS, 1 + RAMP, SUBSTEPS).clip(max=1)[None, :, None]
        for step in range(steps):
            rows = slice(step * SUBSTEPS, (step + 1) * SUBSTEPS)
            after = (target + action_NLA[:, step, :3]).clip(*limits)
            control[:, rows, :3] = target[:, None] + share * (after - target)[:, None]
            width = np.where(action_NLA[:, step, 3] > 0.5, 0.0, FINGER_OPEN)
            control[:, rows, 3], control[:, rows, 4] = -width[:, None], width[:, None]
            target = after
        state, _ = self.rollout(self.model, self.data, state_NS, control, persistent_pool=False)
        return state[:, SUBSTEPS - 1 :: SUBSTEPS]


@cache
def physics(shape: str) -> Physics:
    """The scene of a shape, made once per process."""
    return Physics(shape)
