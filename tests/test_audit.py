from headway.cluster.audit import LengthAudit


def test_distance_of_two_distributions_by_hand() -> None:
    audit = LengthAudit()
    assert audit.ks() == 0.0
    audit.sampled.update([1, 1, 2, 4])
    audit.trained.update([2, 4, 4, 4])
    # Cumulative shares at 1, 2, 4: sampled 0.5, 0.75, 1; trained 0, 0.25, 1.
    assert audit.ks() == 0.5
    assert audit.record() == {"length_ks": 0.5, "sampled_mean": 2.0, "trained_mean": 3.5}


def test_equal_distributions_have_no_distance_whatever_their_sizes() -> None:
    audit = LengthAudit()
    audit.sampled.update([3, 5] * 10)
    audit.trained.update([3, 5])
    assert audit.ks() == 0.0


def test_it_goes_on_after_a_resume() -> None:
    audit = LengthAudit()
    audit.sampled.update([3, 5, 5])
    audit.trained.update([5])
    again = LengthAudit.resume(audit.state())
    assert again == audit and again.ks() == audit.ks() == 1 / 3
