"""Words of the command line."""


def with_changes(words, *others):
    """The words with some settings replaced: each setting may be given once."""
    changed = [other.partition("=")[0] for other in others]
    return [*(word for word in words if word.partition("=")[0] not in changed), *others]


def words_of(experiment):
    """All settings of an experiment as words of the command line."""
    return [f"{key}={value}" for key, value in experiment.to_dict().items()]
