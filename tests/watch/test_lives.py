from rollyard.events import Keep
from rollyard.lives import GroupsRecovered, Reuse
from rollyard.types import Begun, Completion, FinishReason, Group, Partial, Prompt, Reward, Rollout
from rollyard.watch.lives import Lives


def done(group: int, member: int, tokens: int) -> Rollout:
    completion = Completion(group, member, (1,) * tokens, (-0.5,) * tokens, (), FinishReason.STOP, "")
    return Rollout(completion, Reward(1.0))


def test_what_is_used_again_is_not_lost() -> None:
    whole = Group(Prompt(1, 1, (1,), ""), (done(1, 0, 3), done(1, 1, 4)))
    late = Group(Prompt(2, 2, (1,), ""), (done(2, 0, 5),))
    begun = Begun(3, (done(3, 0, 6),), (done(3, 1, 7).completion,), (Partial(2, (1,) * 8, (-0.5,) * 8, ()),))
    lives = Lives(2, (0, 4), 1).saw(GroupsRecovered((late,), ((whole,),), (begun,)))
    assert lives == Lives(2, (0, 4), 1, lost=33)
    lives = lives.saw(Keep(whole, recovered=True)).saw(Keep(late)).saw(Reuse(Begun(3, (), (), begun.partials)))
    assert lives == Lives(2, (0, 4), 1, groups=1, members=3, tokens=15, lost=18)
