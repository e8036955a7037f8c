"""Scores for rows.jsonl. By hand: mm-grpo rewards try own_reward.py:own_reward --completion 3 --column answer=3"""


def own_reward(completion: str, answer: str) -> float | None:
    """1 when the last word of the completion is the row's answer; None when the row has none."""
    if not answer:
        return None
    words = completion.replace(".", " ").split()
    return float(bool(words) and words[-1].lower() == answer.lower())
